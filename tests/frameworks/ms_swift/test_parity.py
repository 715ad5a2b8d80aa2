"""`parity` on files and a script of ms-swift: its own MegatronTrainer trains what mcore-bridge builds, on each cut."""

import subprocess
import sys

import pytest
import yaml

from ..parity import compare, explanations

pytestmark = [pytest.mark.forked("torch")]

RUN = {
    "model_type": "qwen2",
    "template": "qwen2_5",
    "dataset": "sft.jsonl",
    "micro_batch_size": 2,
    "lr": "1e-5",
    "tensor_model_parallel_size": 4,
    "sequence_parallel": True,
    "context_parallel_size": 2,
    "mtp_num_layers": 1,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
# The arguments of a run that is refused, and why.
REFUSED = [
    ({"mtp_loss_type": "tv"}, "mtp_loss_type comes with the patch "),
    ({"num_layerz": 24}, "num_layerz: the MegatronSftArguments that is installed has no such field"),
    ({"tuner_type": "lora"}, "the run trains adapters"),
    ({"model": "absent"}, "ms-swift does not take its arguments: "),
    ({"optimizer": "lion"}, "ms-swift does not take its arguments: argument --optimizer: invalid choice"),
    ({"freeze_parameters_ratio": 0.5}, "take freeze_parameters, its _regex and its _ratio out"),
]


def test_a_defect_of_mcore_bridge_is_named_and_goes_away_with_the_patches(tmp_path):
    subprocess.run([sys.executable, "-m", "tests.frameworks.ms_swift.save_model", str(tmp_path)], check=True)
    files = []
    for number, arguments in enumerate([{}, *(arguments for arguments, _ in REFUSED)]):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(yaml.safe_dump({"model": str(tmp_path / "model"), **RUN, **arguments}))
    script = tmp_path / "train.sh"
    script.write_text("NPROC_PER_NODE=8 megatron sft 0.yaml --fp8_format hybrid\n")
    code, answer = compare([script, *files[1:]], tmp_path, "--cut", "TP2 with SP", "--cut", "CP2 by p2p")
    assert code == 1
    run, *refused = answer
    assert explanations(run) == {"CP2 by p2p": {"ML-7498"}} and len(run["cuts"]) == 2
    assert all(cut["goes_away_with_all_patches"] for cut in run["cuts"] if cut["findings"])
    assert {"dataset sft.jsonl", "fp8_format hybrid"} <= {flag for flags in run["left_out"].values() for flag in flags}
    for one, (_, why) in zip(refused, REFUSED, strict=True):
        assert why in one["refused"]
