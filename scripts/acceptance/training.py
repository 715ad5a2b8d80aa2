"""A small GPT with MTP heads on the bytes of the standard library; its heads trained from one frozen main model."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console

from scripts import study

VOCABULARY, LENGTH, BATCH, DEPTHS = 256, 96, 16, 3
MAIN_STEPS, HEAD_STEPS, MEASURE_EVERY = 700, 400, 50
LEARNING_RATE = 2e-3


class Trained(NamedTuple):
    """A main model whose heads have learned nothing, and the bytes to train on and held out, as int64."""

    main_model: Any
    text: torch.Tensor
    held_out: torch.Tensor


@contextmanager
def trained_main_model(console: Console) -> Iterator[Trained]:
    """Train a main model on one rehearsed rank, whose process group is there inside the context."""
    study.rehearse()
    text, held_out = texts()
    console.print(f"training the main model: {MAIN_STEPS} steps")
    yield Trained(train_main_model(text), text, held_out)
    torch.distributed.destroy_process_group()


def texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the bytes to train on and the bytes held out, as int64."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    content = b"\n".join(file.read_bytes() for file in files)
    everything = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    cut = len(everything) * 9 // 10
    return everything[:cut], everything[cut:]


def batches(text: torch.Tensor, count: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield `count` batches [b, n + 1] from random places."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        begins = torch.randint(0, len(text) - LENGTH - 1, (BATCH,), generator=generator)
        yield torch.stack([text[begin : begin + LENGTH + 1] for begin in begins.tolist()])


def make_model(settings: dict[str, Any], seed: int = 1) -> Any:
    """Return a seeded GPTModel with detached heads, whose loss has these settings."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from scripts.tiny_gpt import build_gpt, make_config

    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    config = make_config(
        num_layers=3,
        hidden_size=128,
        mtp_num_layers=DEPTHS,
        mtp_loss_scaling_factor=float(DEPTHS),
        **settings,
        mtp_detach_heads=True,
        use_cpu_initialization=True,
    )
    return build_gpt(config, VOCABULARY, LENGTH, tied=False)


def run(model: Any, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the main model's loss [b, n] on batches of `batches`; the heads' losses are attached to it."""
    from scripts.tiny_gpt import causal_inputs

    *inputs, labels = causal_inputs(tokens)
    return model(*inputs, labels=labels, loss_mask=torch.ones(labels.shape) if mask is None else mask)


def steps(parameters: list[Any], text: torch.Tensor, count: int, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield the number of each step and its batch, of which the caller computes the gradients; AdamW, cosine."""
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, count, LEARNING_RATE / 10)
    for step, tokens in enumerate(batches(text, count, seed), start=1):
        optimizer.zero_grad()
        yield step, tokens
        optimizer.step()
        schedule.step()


def train_main_model(text: torch.Tensor) -> Any:
    """Return a model whose heads have learned nothing."""
    from megatron_mtp_patches import mtp_pass

    model = make_model({})
    trained = [parameter for name, parameter in model.named_parameters() if not name.startswith("mtp.")]
    for _, tokens in steps(trained, text, MAIN_STEPS, seed=2):
        with mtp_pass(compute=False):
            run(model, tokens).mean().backward()
    return model


def train_heads(
    main_model: Any,
    text: torch.Tensor,
    held_out: torch.Tensor,
    settings: dict[str, Any],
    start: str = "random",
    seed: int = 1,
    count: int = HEAD_STEPS,
) -> tuple[Any, list[Any]]:
    """Train the heads of a copy, the rest frozen.

    Args:
        settings: of the loss of the heads.
        start: how the heads are initialized, as --mtp-init does it.
        seed: of random heads, and of the batches.
        count: the number of steps.

    Returns:
        (model, [(step, metrics of `mtp_pass` on held-out text)]).
    """
    model = make_model(settings, seed)
    main_weights = {name: weight for name, weight in main_model.state_dict().items() if not name.startswith("mtp.")}
    model.load_state_dict(main_weights, strict=False)
    if start == "last-layer":
        from megatron_overrides.mtp.new_heads.initialization import initialize_from_last_layer

        initialize_from_last_layer([model])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("mtp."))
    heads = [parameter for parameter in model.parameters() if parameter.requires_grad]
    curve = [(0, measure(model, held_out))]
    for step, tokens in steps(heads, text, count, seed=2 + seed):
        if step > 1 and (step - 1) % MEASURE_EVERY == 0:
            curve.append((step - 1, measure(model, held_out)))
        (0 * run(model, tokens).mean()).backward()
    return model, [*curve, (count, measure(model, held_out))]


def measure(model: Any, text: torch.Tensor) -> dict[str, float]:
    """Return the losses and the accepted lengths of the heads on 8 batches of `text`."""
    from megatron_mtp_patches import mtp_pass

    with torch.no_grad(), mtp_pass(compute=True) as metrics:
        for tokens in batches(text, 8, seed=4):
            run(model, tokens)
    return metrics.reduce()


def measure_text(model: Any, text: torch.Tensor, first: int) -> dict[str, float]:
    """Return what the log says of `text`, [b, n] int64, for drafts that begin after each token from `first` on."""
    from megatron_mtp_patches import mtp_pass

    # A draft after `first` known tokens starts from the position two before; its first label is one further.
    mask = torch.ones(text.size(0), text.size(1) - 1)
    mask[:, : first - 1] = 0
    with torch.no_grad(), mtp_pass(compute=True) as metrics:
        run(model, text, mask)
    return metrics.reduce()
