"""Upstream's pretrain_gpt.py with TransformerEngine's layers in each parallel layout: it trains, resumes, is verified.

Its losses are those of a training that must have the same ones. No wheel has the script: PYTHONPATH=CHECKOUT pytest
FILE --write-tables, and the Megatron of CHECKOUT takes the place of the wheel's. It compiles a helper with pybind11;
the packed layouts need datasets and transformers < 5.
"""

import math
import re
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest
from megatron_mtp_patches import rehearsal
from megatron_mtp_patches.engine.source import find_file

from tests.warm.processes import run_ranks

from .conftest import run_command
from .conversations import write_conversations

UPSTREAM = find_spec("pretrain_gpt")
pytestmark = [
    pytest.mark.forked("megatron"),
    pytest.mark.skipif(UPSTREAM is None, reason="no pretrain_gpt.py: PYTHONPATH names no checkout of Megatron-LM"),
    pytest.mark.skipif(not rehearsal.with_transformer_engine(), reason="TransformerEngine is not installed"),
]
ITERATIONS, SAVED_AT = 6, 3
TOLERANCE = 5e-3  # losses start at 4.9; bf16 activations, and the bf16 moments of one layout, cause most of it
MODEL = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 --global-batch-size 4
    --train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters {ITERATIONS}
    --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-interval 1000 --eval-iters 1 --split 99,1,0 --bf16
    --use-distributed-optimizer --mtp-num-layers 2 --mtp-detach-heads --mtp-clip-grad 0.05
""".split()
MOCK_DATA = "--micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 128".split()
TRANSFORMER_ENGINE, LOCAL = (["--transformer-impl", name] for name in ("transformer_engine", "local"))
NAMES = ("lm loss", "mtp_1 loss", "mtp_2 loss", "grad norm", "mtp grad norm")
LINE = re.compile(r"iteration +(\d+)/.*?" + "".join(rf" {name}: +(\S+) \|.*?" for name in NAMES))
LOSSES = 3  # the first of NAMES


class Layout(NamedTuple):
    """A parallel layout, and the training that must have the same losses.

    Attributes:
        flags: those that Megatron's own layers support, too.
        more: those that only TransformerEngine's layers support.
        reference: "local", the same layout with Megatron's own layers; "1 rank", if Megatron does not allow context
            parallelism with them; or "", if no other training can be compared.
        packed: one sample holds several conversations.
    """

    name: str
    ranks: int
    flags: str = ""
    more: str = ""
    reference: str = "local"
    packed: bool = False


EXPERTS = (
    "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1 "
    "--num-experts 4 --moe-grouped-gemm --moe-router-topk 2 --moe-token-dispatcher-type alltoall"
)
LOW_PRECISION = "--main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
LAYOUTS = (
    Layout("1 rank", 1),
    Layout("DP2", 2),
    Layout("TP2, sequence parallel", 2, "--tensor-model-parallel-size 2", "--sequence-parallel"),
    Layout("PP2", 2, "--pipeline-model-parallel-size 2"),
    Layout("CP2", 2, "--context-parallel-size 2", reference="1 rank"),
    Layout("1 rank, packed", 1, reference="", packed=True),
    Layout("CP2, packed", 2, "--context-parallel-size 2", reference="1 rank", packed=True),
    Layout("EP2 x TP2, grouped GEMM", 2, EXPERTS, reference=""),
    Layout("DP2, precision-aware optimizer", 2, more=f"--use-precision-aware-optimizer {LOW_PRECISION}"),
)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_layout_trains_resumes_and_is_verified(layout, tmp_path, record_property):
    row = {"ranks": layout.ranks}
    record_property("layouts", [layout.name, row])
    if why := why_not(layout):
        row["not run"] = why
        pytest.skip(why)
    data = write_conversations(tmp_path) if layout.packed else MOCK_DATA
    words = [*MODEL, *data, *layout.flags.split(), *layout.more.split(), *TRANSFORMER_ENGINE]
    straight = train(layout.ranks, [*words, "--save", str(tmp_path), "--save-interval", str(SAVED_AT)])
    row["loss"] = straight[ITERATIONS][0]
    row["resumes"] = why_no_resume(layout) or "yes"
    if row["resumes"] == "yes":
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
        resumed = train(layout.ranks, [*words, "--load", str(tmp_path)], first=SAVED_AT + 1)
        assert resumed == {iteration: straight[iteration] for iteration in resumed}
    if layout.reference:
        other = (1, TRANSFORMER_ENGINE) if layout.reference == "1 rank" else (layout.ranks, LOCAL)
        flags = layout.flags.split() if layout.reference == "local" else []
        reference = train(other[0], [*MODEL, *data, *flags, *other[1]])
        row["reference"] = reference[ITERATIONS][0]
        # Megatron logs the mean of the ranks' MTP losses, and 0 is that of a rank that has no counted token
        compared = range(1 if layout.packed else LOSSES)
        row["difference"] = max(abs(straight[i][place] - reference[i][place]) for i in straight for place in compared)
        assert row["difference"] <= TOLERANCE
    assert "verify-mtp: the MTP loss has reached" in run(layout.ranks, "verify-mtp", words)


def train(ranks, words, first=1):
    """{iteration: the numbers of NAMES}"""
    output = run(ranks, "run", words)
    printed = {int(iteration): [*map(float, numbers)] for iteration, *numbers in LINE.findall(output)}
    assert sorted(printed) == list(range(first, ITERATIONS + 1)), output[-2000:]
    assert all(map(math.isfinite, sum(printed.values(), []))), output[-2000:]
    return printed


def run(ranks, command, words):
    """What the ranks print."""
    words = [command, "--device", "cpu", UPSTREAM.origin, *words]
    ended = run_ranks(ranks, partial(run_command, "all", *words))
    output = "".join(rank.output for rank in ended)
    assert {rank.code for rank in ended} == {0}, output[-6000:]
    return output


def why_not(layout):
    """Why this Megatron cannot train the layout on a GPU either; "" if it can."""
    script = Path(UPSTREAM.origin).read_text(encoding="utf-8")
    if not layout.packed or "get_thd_batch_on_this_cp_rank" not in script:
        return ""
    if "cu_seqlens = cu_seqlens[0]" not in script:
        return "its pretrain_gpt.py leaves the lengths of packed sequences two-dimensional, which the kernels refuse"
    if layout.ranks > 1:
        return "its pretrain_gpt.py looks for padded lengths of packed sequences, which its dataset never gives"
    return ""


def why_no_resume(layout):
    """Why this Megatron cannot resume the layout on a GPU either; "" if it can."""
    optimizer = find_file("megatron.core.optimizer.distrib_optimizer").read_text(encoding="utf-8")
    if "precision-aware" in layout.more and "not isinstance(v, torch.Tensor)" not in optimizer:
        return "its distributed optimizer hands `padding=False` to FusedAdam.set_scaled_state, which takes tensors"
    return ""
