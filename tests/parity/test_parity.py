"""`parity -- FLAGS` on a run of Megatron's trainer: equal cuts, a cut that a known defect spoils, and wrong usage."""

import json
import os

import pytest

from scripts.common.forks import fork, wait
from tests.pages import ROOT

pytestmark = pytest.mark.forked("torch")
pytest.importorskip("megatron.training", reason="the 0.16.1 wheel has no megatron.training")
SCRIPT = ROOT / "scripts" / "demo" / "train.py"
DENSE = "--num-layers 24 --hidden-size 2048 --num-attention-heads 16 --position-embedding-type rope --bf16"
FSDP = "--use-megatron-fsdp --use-distributed-optimizer --ckpt-format fsdp_dtensor"


@pytest.fixture
def parity(tmp_path):
    """parity(flags, patches): the exit code, and what the command has printed, as JSON where it is."""
    import time

    from megatron_mtp_patches.cli import main

    def run(flags, patches="all", options=("--ranks", "2", "--json", "--script", str(SCRIPT))):
        os.environ["MEGATRON_MTP_PATCHES"] = patches
        log = tmp_path / "log"
        pid = fork(lambda: os._exit(main(["parity", *options, "--", *flags.split()])), log)
        code = wait([pid], time.monotonic() + 300)[pid]
        text = log.read_text()
        return code, json.loads(text[text.index("{") :]) if code not in (1, 2) or "{" in text else text

    return run


def test_cuts_of_a_dense_model_are_equal(parity):
    code, answer = parity(f"{DENSE} --pipeline-model-parallel-size 4 --tensor-model-parallel-size 2 --mtp-num-layers 1")
    assert code == 0, answer
    assert {cut["name"]: cut["findings"] for cut in answer["cuts"]} == {"TP2": [], "PP2": [], "DP2": []}
    assert not any(cut["refused"] for cut in answer["cuts"])


def test_a_cut_that_a_known_defect_spoils_is_explained_by_it(parity):
    pytest.importorskip("transformer_engine", reason="its layers fuse the gradients that are lost")
    code, answer = parity(f"{DENSE} {FSDP} --data-parallel-sharding-strategy optim_grads_params", patches="none")
    (cut,) = answer["cuts"]
    assert (code, cut["name"], cut["goes_away_with_all_patches"]) == (1, "DP2", True)
    assert {"kind": "gradient", "name": "embedding.word_embeddings.weight"}.items() <= cut["findings"][0].items()
    (explanation,) = cut["explanations"]
    assert (explanation["id"], explanation["is_confirmed"]) == ("fsdp-tied-embeddings", True)
    assert explanation["patch"] == "keep-gradients-of-tied-embeddings"


def test_flags_that_megatron_refuses_are_wrong_usage(parity):
    code, text = parity(f"{DENSE} --swiglu --squared-relu")
    assert code == 2 and "the run made small does not train on one rank: " in text


def test_a_script_that_is_not_there_is_wrong_usage(parity):
    code, text = parity(DENSE, options=("--script", "no_such.py"))
    assert code == 2 and "no such script: no_such.py" in text
