"""The cost of the losses of MTP heads: bytes of fake tensors, and seconds of real ones.

    python -m scripts.bench losses [--out ci/losses]

Runs process_mtp_loss and its backward on one rank, with whole logits and with chunks. Bytes are exact on any machine;
run the seconds alone. Needs torch and megatron-core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from scripts import study
from scripts.common.markdown import Table
from scripts.common.process import ROOT

LOSSES = ("cross_entropy", "kl", "tv", "lk", "e2e_tv")
HEADS = [(depths, is_detached) for depths in (1, 3) for is_detached in (True, False)]
ROUNDS = 5


class Sizes(NamedTuple):
    """The size of one microbatch of one sequence; `chunk` is how many rows a chunk has."""

    tokens: int
    vocabulary: int
    hidden: int
    chunk: int
    dtype: str


CHUNKS = (64, 128, 256, 512)  # rows
FAKE, TIMED = Sizes(4096, 131072, 1024, 256, "bfloat16"), Sizes(512, 8192, 2048, 128, "float32")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=ROOT / "ci" / "losses", help="folder of the table")


def run(options: argparse.Namespace) -> None:
    import torch

    study.rehearse()
    torch.set_num_threads(1)
    tables = [memory(), seconds(), seconds_by_chunk()]
    for table in tables:
        table.show()
    about = f"Made by `python -m scripts.bench losses` with {study.made_with()}."
    page = study.page("What the losses of MTP heads cost", tables, about)
    (options.out / "cost.md").write_text(page, encoding="utf-8")
    torch.distributed.destroy_process_group()


def memory() -> Table:
    """Peak bytes of the heads' part, without the gradient of the output weight."""
    rows = []
    for depths, is_detached in HEADS:
        whole = peak_bytes("cross_entropy", depths, is_detached, 0)
        chunked = [peak_bytes(loss_type, depths, is_detached, FAKE.chunk) for loss_type in LOSSES]
        cells = [f"{_gib(size)} ({100 * size / whole:.1f} %)" for size in chunked]
        rows.append([f"{depths}", "detached" if is_detached else "attached", _gib(whole), *cells])
    note = (
        f"GiB at the peak of forward and backward, of fake tensors, without the output weight and its gradient: "
        f"{FAKE.tokens} tokens, vocabulary {FAKE.vocabulary}, hidden size {FAKE.hidden}, bfloat16, chunks of "
        f"{FAKE.chunk} rows. In brackets the part of whole logits. One float32 copy of a chunk's logits has "
        f"{_gib(FAKE.chunk * FAKE.vocabulary * 4)} GiB, of whole logits {_gib(FAKE.tokens * FAKE.vocabulary * 4)}; "
        f"hidden states of the main model and of each head and their gradients have "
        f"{_gib(2 * FAKE.tokens * FAKE.hidden * 2)} GiB."
    )
    columns = ["heads", "", "cross entropy, whole logits", "chunked", *LOSSES[1:]]
    return Table("Bytes", columns, rows, note=note)


def peak_bytes(loss_type: str, depths: int, is_detached: bool, chunk_size: int) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from scripts.bench.peak import PeakBytes

    with FakeTensorMode():
        step = prepare(FAKE, loss_type, depths, is_detached, chunk_size)
        # A chunk's gradient of the output weight is as large as the whole, to which it is added.
        with PeakBytes(left_out=FAKE.vocabulary * FAKE.hidden * 2) as counted:
            step()
    return counted.peak


def seconds() -> Table:
    """Chunked over whole cross entropy, and the other losses beside it; the median of rounds side by side."""
    rows = []
    for depths, is_detached in HEADS:
        kinds = [("cross_entropy", 0), *((loss_type, TIMED.chunk) for loss_type in LOSSES)]
        ratios = _ratios([prepare(TIMED, loss_type, depths, is_detached, size) for loss_type, size in kinds])
        rows.append([f"{depths}", "detached" if is_detached else "attached", *ratios])
    note = (
        f"Seconds of forward and backward over those of cross entropy with whole logits, median of {ROUNDS} rounds "
        f"side by side on one CPU thread: {TIMED.tokens} tokens, vocabulary {TIMED.vocabulary}, hidden size "
        f"{TIMED.hidden}, float32, chunks of {TIMED.chunk} rows. The other losses also project the main model. Not "
        f"run on a GPU."
    )
    return Table("Time", ["heads", "", "cross entropy, chunked", *LOSSES[1:]], rows, note=note)


def seconds_by_chunk() -> Table:
    """Chunked over whole cross entropy of attached heads, by the rows of a chunk."""
    steps = [prepare(TIMED, "cross_entropy", depths=1, is_detached=False, chunk_size=size) for size in (0, *CHUNKS)]
    note = (
        f"As above, with one attached head. A chunk of {TIMED.tokens} rows is the whole sequence: what it takes longer "
        f"is the projection in the backward pass."
    )
    return Table("Time by the rows of a chunk", [f"{size} rows" for size in CHUNKS], [_ratios(steps)], note=note)


def _ratios(steps: list[Callable[[], None]]) -> list[str]:
    """The time of each step over that of the first one, the median of rounds side by side."""
    times = [[_time(step) for step in steps] for _ in range(ROUNDS)]
    return [f"{statistics.median(row[number] / row[0] for row in times):.2f}" for number in range(1, len(steps))]


def _time(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def prepare(sizes: Sizes, loss_type: str, depths: int, is_detached: bool, chunk_size: int) -> Callable[[], None]:
    """Return a function that runs the losses and their backward once; a `chunk_size` of 0 is for whole logits."""
    import torch
    from megatron.core import tensor_parallel
    from megatron.core.transformer import multi_token_prediction as mtp

    from scripts.tiny_gpt import make_config

    dtype = getattr(torch, sizes.dtype)
    heads = {"mtp_num_layers": depths, "mtp_loss_type": loss_type, "mtp_detach_heads": is_detached}
    heads["mtp_logits_chunk_size"] = chunk_size
    config = make_config(hidden_size=sizes.hidden, params_dtype=dtype, use_cpu_initialization=True, **heads)
    weight: Any = {"init_method": torch.nn.init.normal_, "bias": False, "gather_output": False}
    output_layer = tensor_parallel.ColumnParallelLinear(sizes.hidden, sizes.vocabulary, config=config, **weight)
    hidden = torch.randn((1 + depths) * sizes.tokens, 1, sizes.hidden, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, sizes.vocabulary, (1, sizes.tokens))
    mask = torch.ones(1, sizes.tokens)

    def cross_entropy(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        losses = tensor_parallel.vocab_parallel_cross_entropy(logits.float(), labels.transpose(0, 1).contiguous())
        return losses.transpose(0, 1)

    mtp.MTPLossAutoScaler.set_loss_scale(torch.tensor(1.0))

    def step() -> None:
        hidden.grad = output_layer.weight.grad = None
        output = (output_layer, None, None, False, cross_entropy, config)
        mtp.process_mtp_loss(hidden, labels, mask, *output, input_ids=None).sum().backward()

    return step


def _gib(size: int) -> str:
    return f"{size / 2**30:.3f}"
