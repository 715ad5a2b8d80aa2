"""The parallel layouts, and the command line of a small GPT with two MTP heads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ITERATIONS, SAVED_AT = 6, 3
SEQUENCE = 64

MODEL = f"""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length {SEQUENCE}
    --max-position-embeddings {SEQUENCE} --position-embedding-type rope --swiglu --normalization RMSNorm
    --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
    --global-batch-size 4 --train-iters {ITERATIONS} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine
    --lr-decay-iters {ITERATIONS} --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-interval 1000
    --eval-iters 1 --split 99,1,0 --bf16 --use-distributed-optimizer
    --mtp-num-layers 2 --mtp-detach-heads --mtp-clip-grad 0.05
""".split()
MOCK_DATA = "--micro-batch-size 2 --mock-data --tokenizer-type NullTokenizer --vocab-size 128".split()
TRANSFORMER_ENGINE = ["--transformer-impl", "transformer_engine"]
LOCAL = ["--transformer-impl", "local"]


@dataclass(frozen=True)
class Layout:
    """A parallel layout, and the training that must have the same losses.

    Attributes:
        flags: the flags of the layout that Megatron's own layers support, too.
        more: the flags that only TransformerEngine's layers support.
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


LAYOUTS = (
    Layout("1 rank", 1),
    Layout("DP2", 2),
    Layout("TP2, sequence parallel", 2, "--tensor-model-parallel-size 2", "--sequence-parallel"),
    Layout("PP2", 2, "--pipeline-model-parallel-size 2"),
    Layout("CP2", 2, "--context-parallel-size 2", reference="1 rank"),
    Layout("1 rank, packed", 1, reference="", packed=True),
    Layout("CP2, packed", 2, "--context-parallel-size 2", reference="1 rank", packed=True),
    Layout(
        "EP2 x TP2, grouped GEMM",
        2,
        "--tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        "--expert-tensor-parallel-size 1 --num-experts 4 --moe-grouped-gemm --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall",
        reference="",
    ),
    Layout(
        "DP2, precision-aware optimizer",
        2,
        more="--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16",
    ),
)


def why_not(checkout: Path, layout: Layout) -> str:
    """Say why this Megatron cannot train the layout on a GPU either; "" if it can."""
    script = (checkout / "pretrain_gpt.py").read_text(encoding="utf-8")
    if not layout.packed or "get_thd_batch_on_this_cp_rank" not in script:
        return ""
    if "cu_seqlens = cu_seqlens[0]" not in script:
        return "its pretrain_gpt.py leaves the lengths of packed sequences two-dimensional, which the kernels refuse"
    if layout.ranks > 1:
        return "its pretrain_gpt.py looks for padded lengths of packed sequences, which its dataset never gives"
    return ""


def why_no_resume(checkout: Path, layout: Layout) -> str:
    """Say why this Megatron cannot resume the layout on a GPU either; "" if it can."""
    optimizer = (checkout / "megatron/core/optimizer/distrib_optimizer.py").read_text(encoding="utf-8")
    if "precision-aware" in layout.more and "not isinstance(v, torch.Tensor)" not in optimizer:
        return "its distributed optimizer hands `padding=False` to FusedAdam.set_scaled_state, which takes tensors"
    return ""
