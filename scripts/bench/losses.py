"""What the losses of MTP heads cost: bytes of fake tensors, and seconds of real ones.

    python -m scripts.losses.cost [--out ci/losses]

Runs process_mtp_loss and its backward on one rank, with whole logits and with chunks. Bytes are exact on any machine;
run the seconds alone. Needs torch and megatron-core.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from scripts.common.arguments import make_parser
from scripts.common.markdown import Table
from scripts.common.process import ROOT

TOKENS, VOCABULARY, HIDDEN, CHUNK = 4096, 131072, 1024, 256
TIMED_TOKENS, TIMED_VOCABULARY, TIMED_HIDDEN, TIMED_CHUNK, ROUNDS = 512, 8192, 2048, 128, 5


class Work(NamedTuple):
    """One microbatch of one sequence.

    Attributes:
        chunk_size: as `mtp_logits_chunk_size`; 0 for whole logits.
    """

    loss_type: str
    depths: int
    is_detached: bool
    chunk_size: int
    tokens: int
    vocabulary: int
    hidden: int
    dtype: str


def main() -> int:
    parser = make_parser("scripts.losses.cost", __doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "losses", help="folder of the table")
    options = parser.parse_args()
    from megatron_mtp_patches import rehearsal

    rehearsal.install()
    import megatron_mtp_patches  # noqa: F401
    import torch
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel()
    torch.set_num_threads(1)
    tables = [memory(), seconds()]
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("megatron-core", "torch"))
    lines = ["# What the losses of MTP heads cost", "", f"Made by `python -m scripts.losses.cost` with {versions}.", ""]
    for table in tables:
        table.show()
        lines += table.section()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "cost.md").write_text("\n".join(lines), encoding="utf-8")
    torch.distributed.destroy_process_group()
    return 0


def memory() -> Table:
    """Peak bytes of the heads' part, without the gradient of the output weight."""
    rows = []
    for depths in (1, 3):
        for is_detached in (True, False):
            whole = peak_bytes(make_work("cross_entropy", depths, is_detached, 0))
            cells = [f"{depths}", "detached" if is_detached else "attached", _gib(whole)]
            for loss_type in ("cross_entropy", "kl", "tv", "e2e_tv"):
                chunked = peak_bytes(make_work(loss_type, depths, is_detached, CHUNK))
                cells.append(f"{_gib(chunked)} ({100 * chunked / whole:.1f} %)")
            rows.append(cells)
    kept = CHUNK * VOCABULARY * 4
    note = (
        f"GiB at the peak of forward and backward, of fake tensors, without the output weight and its gradient: "
        f"{TOKENS} tokens, vocabulary {VOCABULARY}, hidden size {HIDDEN}, bfloat16, chunks of {CHUNK} rows. In "
        f"brackets the part of whole logits. One float32 copy of a chunk's logits has {_gib(kept)} GiB, of whole "
        f"logits {_gib(TOKENS * VOCABULARY * 4)}; hidden states of the main model and of each head and their gradients "
        f"have {_gib(2 * TOKENS * HIDDEN * 2)} GiB."
    )
    columns = ["heads", "", "cross entropy, whole logits", "chunked", "kl", "tv", "e2e_tv"]
    return Table("Bytes", columns, rows, note=note)


def make_work(loss_type: str, depths: int, is_detached: bool, chunk_size: int) -> Work:
    return Work(loss_type, depths, is_detached, chunk_size, TOKENS, VOCABULARY, HIDDEN, "bfloat16")


def peak_bytes(work: Work) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from scripts.losses.peak import PeakBytes

    with FakeTensorMode():
        step = prepare(work)
        # A chunk's gradient of the output weight is as large as the whole, to which it is added.
        with PeakBytes(left_out=work.vocabulary * work.hidden * 2) as counted:
            step()
    return counted.peak


def seconds() -> Table:
    """Chunked over whole cross entropy, and the other losses beside it; the median of rounds side by side."""
    rows = []
    for depths in (1, 3):
        for is_detached in (True, False):
            names = [("cross_entropy", 0), *((name, TIMED_CHUNK) for name in ("cross_entropy", "kl", "tv", "e2e_tv"))]
            steps = [prepare(make_timed_work(name, depths, is_detached, size)) for name, size in names]
            ratios: list[list[float]] = [[] for _ in steps]
            for _ in range(ROUNDS):
                times = [_time(step) for step in steps]
                for found, one in zip(ratios, times, strict=True):
                    found.append(one / times[0])
            medians = [statistics.median(found) for found in ratios]
            kind = "detached" if is_detached else "attached"
            rows.append([f"{depths}", kind, *(f"{ratio:.2f}" for ratio in medians[1:])])
    note = (
        f"Seconds of forward and backward over those of cross entropy with whole logits, median of {ROUNDS} rounds "
        f"side by side on one CPU thread: {TIMED_TOKENS} tokens, vocabulary {TIMED_VOCABULARY}, hidden size "
        f"{TIMED_HIDDEN}, float32, chunks of {TIMED_CHUNK} rows. The other losses also project the main model. Not "
        f"run on a GPU."
    )
    return Table("Time", ["heads", "", "cross entropy, chunked", "kl", "tv", "e2e_tv"], rows, note=note)


def make_timed_work(loss_type: str, depths: int, is_detached: bool, chunk_size: int) -> Work:
    sizes = (TIMED_TOKENS, TIMED_VOCABULARY, TIMED_HIDDEN)
    return Work(loss_type, depths, is_detached, chunk_size, *sizes, "float32")


def _time(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def prepare(work: Work) -> Callable[[], None]:
    """Return a function that runs the losses and their backward once."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer import multi_token_prediction as mtp

    from scripts.losses.measured import cross_entropy

    dtype = getattr(torch, work.dtype)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=work.hidden,
        num_attention_heads=1,
        mtp_num_layers=work.depths,
        mtp_loss_type=work.loss_type,
        mtp_detach_heads=work.is_detached,
        mtp_logits_chunk_size=work.chunk_size,
        params_dtype=dtype,
        use_cpu_initialization=True,
    )
    output_layer = tensor_parallel.ColumnParallelLinear(
        work.hidden, work.vocabulary, config=config, init_method=torch.nn.init.normal_, bias=False, gather_output=False
    )
    hidden = torch.randn((1 + work.depths) * work.tokens, 1, work.hidden, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, work.vocabulary, (1, work.tokens))
    mask = torch.ones(1, work.tokens)
    mtp.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))

    def step() -> None:
        hidden.grad = output_layer.weight.grad = None
        main = mtp.process_mtp_loss(
            hidden, labels, mask, output_layer, None, None, False, cross_entropy, config, input_ids=None
        )
        main.sum().backward()

    return step


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f}"


if __name__ == "__main__":
    sys.exit(main())
