"""`parity` on runs of Megatron's trainer: equal cuts, a cut that a known defect spoils, files, and wrong usage."""

import os
import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
from megatron_mtp_patches.catalog import CATALOG
from megatron_mtp_patches.parity.comparison import Deviation

from tests.pages import ROOT

pytestmark = pytest.mark.forked("torch")
pytest.importorskip("megatron.training", reason="the 0.16.1 wheel has no megatron.training")
SCRIPT = ROOT / "scripts" / "demo" / "train.py"
OPTIONS = ("--ranks", "2", "--json", "--script", str(SCRIPT))
DENSE = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --position-embedding-type rope --bf16"
OVERLAP = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
FSDP = "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor"

# The second layer of a cut over tensor-parallel ranks returns a little too much.
SPOILED = """
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer
from scripts.demo.trainer import main

forward = TransformerLayer.forward


def spoiled_forward(self, *values, **named):
    hidden, *rest = forward(self, *values, **named)
    is_spoiled = self.layer_number == 2 and parallel_state.get_tensor_model_parallel_world_size() == 2
    return (hidden + 0.01 * hidden.roll(1, -1) if is_spoiled else hidden, *rest)


if __name__ == "__main__":
    TransformerLayer.forward = spoiled_forward
    main()
"""


def test_cuts_of_a_dense_model_are_equal(parity):
    flags = f"{DENSE} {OVERLAP} --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --mtp-num-layers 1"
    code, answer = parity(*OPTIONS, "--", *flags.split())
    assert code == 0, answer
    assert {cut["name"]: cut["findings"] for cut in answer["cuts"]} == {"TP2": [], "PP2": [], "DP2": []}
    assert not any(cut["refused"] for cut in answer["cuts"])
    assert len(answer["patches"]) == len(CATALOG)


def test_a_cut_that_a_known_defect_spoils_is_explained_by_it_and_shown_again_by_a_program(
    parity, tmp_path, monkeypatch
):
    from megatron_mtp_patches.parity.cuts import list_cuts
    from megatron_mtp_patches.parity.flags import join
    from megatron_mtp_patches.parity.small import shrink

    pytest.importorskip("transformer_engine", reason="its layers fuse the gradients that are lost")
    flags = f"{DENSE} {FSDP} --data-parallel-sharding-strategy optim_grads_params"
    program = tmp_path / "report.py"
    code, answer = parity(*OPTIONS, "--save", str(program), "--", *flags.split(), patches="none")
    (cut,) = answer["cuts"]
    assert (code, cut["name"], cut["goes_away_with_all_patches"]) == (1, "DP2", True)
    assert answer["patches"] == []
    assert {"kind": "gradient", "name": "embedding.word_embeddings.weight"}.items() <= cut["findings"][0].items()
    (explanation,) = cut["explanations"]
    assert (explanation["id"], explanation["is_confirmed"]) == ("fsdp-tied-embeddings", True)
    assert explanation["patch"] == "keep-gradients-of-tied-embeddings"
    assert cut["begins"] is None and cut["controls"] == {}

    words = []
    monkeypatch.setattr("megatron_mtp_patches.cli.main", words.extend)
    monkeypatch.setitem(os.environ, "MEGATRON_MTP_PATCHES", "")
    with pytest.raises(SystemExit):
        runpy.run_path(str(program))
    monkeypatch.undo()
    assert words[:5] == ["parity", "--script", "train.py", "--data", "uneven"]
    small = shrink(words[words.index("--") + 1 :], "fp32")
    (again,) = list_cuts(small, 2)
    assert words[words.index("--cut") + 1] == again.name and sorted(join(again.flags)) == sorted(cut["flags"].split())


def test_a_cut_under_the_fsdp_of_torch_is_equal(parity):
    core = Path(find_spec("megatron.core").origin).parent
    if "def finish_grad_sync" not in (core / "distributed" / "torch_fully_sharded_data_parallel.py").read_text():
        pytest.skip("this Megatron has ML-4669, with which no step ends")
    flags = "--use-torch-fsdp2 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion"
    code, answer = parity(*OPTIONS, "--cut", "DP2", "--", *DENSE.split(), *flags.split(), "--ckpt-format", "torch_dist")
    assert code == 0 and [cut["findings"] for cut in answer["cuts"]] == [[]]


def test_a_defect_that_nobody_knows_is_a_finding_that_begins_where_it_acts(parity, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_mtp_patches.parity.study.CONTROLS", ())
    script = tmp_path / "train.py"
    script.write_text(SPOILED)
    options = ("--json", "--script", str(script), "--cut", "TP2")
    code, answer = parity(*options, "--", *DENSE.split(), "--tensor-model-parallel-size", "4")
    (cut,) = answer["cuts"]
    assert code == 3 and cut["explanations"] == [] and cut["findings"]
    assert (cut["begins"]["kind"], cut["begins"]["name"]) == ("hidden state", "layer 2, sample 1")


def test_a_cut_that_does_not_train_is_not_said_to_be_equal():
    from megatron_mtp_patches.cli.parity import STAYS, _exit_code
    from megatron_mtp_patches.parity.cuts import Cut
    from megatron_mtp_patches.parity.study import Result
    from megatron_mtp_patches.parity.verdict import Verdict

    cut = Cut("TP2", 2, ())
    refused, equal = Result(cut, 1.0, refusal="no"), Result(cut, 1.0, verdict=Verdict([], {}))
    differing = Result(cut, 1.0, verdict=Verdict([Deviation(1, "gradient", "weight", 1.0)], {}))
    assert [_exit_code([equal, *others]) for others in ([], [refused], [refused, differing])] == [0, 2, STAYS]


def test_each_file_is_a_run_or_is_refused(parity, tmp_path):
    script, bridge, swift = (tmp_path / name for name in ("run.sh", "run_config.yaml", "args.json"))
    script.write_text(f"torchrun --nproc-per-node 8 train.py {DENSE}\n")
    bridge.write_text("model:\n  tensor_model_parallel_size: 2\n")
    swift.write_text('{"model": "here", "tensor_model_parallel_size": 2}')
    files = (bridge, swift, script, tmp_path / "none.sh")
    code, answer = parity(*OPTIONS, "--batch", *map(str, files))
    bridge_run, swift_run, equal, absent = answer["runs"]
    assert code == 2 and "Megatron-Bridge builds this run, and does not import" in bridge_run["refused"]
    assert "ms-swift and mcore-bridge build this run, and swift." in swift_run["refused"]
    assert "cannot be read" in absent["refused"]
    assert (equal["run"], [cut["findings"] for cut in equal["cuts"]]) == (str(script), [[]])


@pytest.mark.parametrize(
    "words, message",
    [
        (("--swiglu", "--squared-relu"), "the run made small does not train on one rank: "),
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
    ],
)
def test_flags_that_megatron_refuses_are_wrong_usage(parity, words, message):
    code, text = parity(*OPTIONS, "--", *DENSE.split(), *words)
    assert code == 2 and message in text


def test_a_layout_without_such_a_cut_is_wrong_usage(parity):
    code, text = parity(*OPTIONS, "--cut", "TP2", "--", *DENSE.split())
    assert code == 2 and "no cut of this layout and --ranks 2 is 'TP2': DP2" in text
    code, text = parity(*OPTIONS, "--", *DENSE.split(), "--use-megatron-fsdp")  # without the rest of its flags
    assert code == 2 and "none of its cuts trains: DP2" in text


def test_a_script_that_trains_nothing_is_wrong_usage(parity, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import megatron.training\n")
    code, text = parity("--script", str(script), "--", *DENSE.split())
    assert code == 2 and "has ended without a step of Megatron's pretrain()" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (("--script", "no_such.py", "--", "--num-layers", "2"), "no such script: no_such.py"),
        ((), "either the flags of a training"),
        (("--batch", "a", "--save", "b"), "--save is for one run"),
        (("--script", str(SCRIPT), "--save", "no/such", "--", "--num-layers", "2"), "--save no/such: there is no such"),
    ],
)
def test_wrong_usage_says_what_to_change(parity, words, message):
    code, text = parity(*words)
    assert code == 2 and message in text
