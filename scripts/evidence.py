"""The tables that tests write with `pytest --write-tables`: the folders of ci/ that TABLES names.

The record of a table is a list of columns: the versions of the Megatrons that have the same numbers, and their rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from scripts.common.markdown import Table

Column = dict[str, Any]
NORMS = ("norm", "MTP norm", "zeros", "parameters")
TOLERANCE = 1e-5  # of the norms


def make_losses(columns: list[Column]) -> Table:
    """For each condition the differences of loss and gradient from the reference, in float32 and bfloat16."""
    header = _header("condition", columns, "{}: loss", "gradient", "bf16: loss", "gradient")
    conditions = [name.removesuffix(", float32") for name in columns[0]["rows"] if name.endswith(", float32")]
    rows = []
    for condition in conditions:
        differences = (
            column["rows"][f"{condition}, {dtype}"] for column in columns for dtype in ("float32", "bfloat16")
        )
        rows.append([condition, *(f"{number:.1e}" for numbers in differences for number in numbers)])
    note = (
        "Norm of the difference over norm of the reference; the gradient is that of all hidden states of the heads and "
        "of the output weight, on the rank where it is farthest off. Megatrons with the same numbers share a column. 3 "
        "heads, depth weights 1, 0.5 and 2, alpha 0.3 for dpace, a padded vocabulary, scaled logits, chunks of 9 rows. "
        f"float32 may be off by 1e-06 and 1e-05. 2 ranks of a rehearsal; torch {_torch(columns)}."
    )
    return Table("Losses of MTP heads, compared with float64 autograd on full logits", header, rows, note=note)


def make_experts(columns: list[Column]) -> Table:
    """For each condition what is reported without the patch, and how far off it is with it."""
    header = _header("condition", columns, "{}", "patched")
    rows = _make_rows(columns, _experts_cells)
    note = (
        "Without the patch count-experts-in-grad-norm: what is reported, as a part of what all gradients give, "
        "gathered by hand (1: all of it). Patched: the largest relative difference of these numbers. Last rows: the "
        "largest difference of a weight between ranks that hold the same expert, after three steps with learning rate "
        "0.01. Megatron refuses biases of experts with ETP larger than 1. 4 ranks of a rehearsal; TE: "
        f"TransformerEngine; torch {_torch(columns)}."
    )
    return Table("Norms of a mixture of experts, as parts of those of all gradients", header, rows, note=note)


def make_repairs(columns: list[Column]) -> Table:
    """For each cut of a training the numbers without the patches, and how far off they are with them."""
    header = _header("cut", columns, "{}: first norm", "last loss", "patched")
    rows = _make_rows(columns, _repairs_cells)
    note = (
        "A mixture of 4 experts with two heads, uneven loss masks, padding and MoE losses, for ten steps of Adam with "
        "learning rate 0.01. Without the patches: the gradient norm of the first step and the loss of the last one, "
        "each with that of a training in which each rank has the whole model and all samples. Patched: the largest "
        f"relative difference from it of any norm or loss. 4 ranks of a rehearsal; torch {_torch(columns)}."
    )
    return Table("A training that is cut in several ways, compared with one that is not", header, rows, note=note)


def make_qk_clip(columns: list[Column]) -> Table:
    """For each training how far off weights are after a clip, without the patch and with it."""
    header = _header("training", columns, "{}", "patched")
    rows = _make_rows(columns, _qk_clip_cells)
    note = (
        "After --qk-clip has scaled the weights of all layers: the largest relative difference of a weight that the "
        "optimizer keeps in fp32 from one that was scaled by the rule in float64, or the error in which the step ends, "
        "without the patch clip-qk-of-all-layers and with it. 0.004: the optimizer keeps bf16 weights and remainders. "
        "Not run: Muon of 0.16.1 needs emerging-optimizers 0.1, which PyPI lacks; hybrid models have latent attention "
        "from 0.19 on. Hybrid models have layers of attention and of MLPs here, no Mamba layers and no heads. "
        "TransformerEngine's attention computes the largest logits. 2 ranks of a rehearsal; TE: TransformerEngine; "
        f"torch {_torch(columns)}."
    )
    return Table("Weights after a QK clip, compared with the rule", header, rows, note=note)


def make_qk_clip_training(columns: list[Column]) -> Table:
    """The loss and the largest logits after a training whose logits grow, clipped and not."""
    header = _header("training", columns, "{}: loss", "largest logit of the main model", "of the MTP head")
    rows = _make_rows(columns, _qk_clip_training_cells)
    note = (
        "20 steps of layer-wise Muon with learning rate 0.05 on the same two microbatches of each of two ranks, of a "
        "GPT of two layers with grouped-query attention and an MTP head, in bf16. --qk-clip-threshold 20. Loss of the "
        "main model and largest logits in the last step, which are those before its clip. 2 ranks of a rehearsal; TE: "
        f"TransformerEngine; torch {_torch(columns)}."
    )
    return Table("A training whose attention logits grow, with and without a QK clip", header, rows, note=note)


def make_layouts(columns: list[Column]) -> Table:
    """For each Megatron and layout the loss of upstream's script, that of its reference, and whether it resumes."""
    header = ["Megatron", "layout", "ranks", "loss", "reference", "largest difference", "resumes"]
    rows = [
        [_megatrons(column), layout, str(row["ranks"]), *_layouts_cells(row)]
        for column in columns
        for layout, row in column["rows"].items()
    ]
    note = (
        "Upstream's unmodified pretrain_gpt.py with two MTP heads, `--mtp-detach-heads` and `--mtp-clip-grad 0.05`. "
        "Loss: that of the main model at iteration 6. Reference: the same training with `--transformer-impl local`, "
        "without the flags that need TransformerEngine. For context parallelism, which Megatron does not allow with "
        "local layers, the reference is one rank. Largest difference: over all losses of all iterations; at most 0.005 "
        "is accepted. It includes the losses of the MTP heads, except with packed samples: there Megatron logs a mean "
        "over all ranks, including those that have no counted token. Resumes: training from iteration 3 prints the "
        "same numbers to the last digit. verify-mtp passes in each layout that trains. In a rehearsal: "
        "TransformerEngine's (TE) Python is real, its kernels are replaced by stand-ins in torch. Nothing here was "
        "compared with a GPU. The sources of the tag core_v0.19.0 call themselves 0.19.1. "
        f"torch {_torch(columns)}."
    )
    return Table("Parallel layouts with TransformerEngine's layers", header, rows, right=range(2, 6), note=note)


def _header(first: str, columns: list[Column], *names: str) -> list[str]:
    """`names` for each column, with its Megatrons in the place of {}."""
    return [first, *(name.format(_megatrons(column)) for column in columns for name in names)]


def _make_rows(columns: list[Column], make_cells: Callable[[dict[str, Any]], tuple[str, ...]]) -> list[list[str]]:
    """For each condition its name and the cells of each column."""
    return [
        [condition, *(cell for column in columns for cell in make_cells(column["rows"][condition]))]
        for condition in columns[0]["rows"]
    ]


def _repairs_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    whole, patched, unpatched = (row[side] for side in ("whole", "patched", "unpatched"))
    pairs = [pair for steps in zip(patched, whole, strict=True) for pair in zip(*steps, strict=True)]
    farthest = max(abs(number / right - 1.0) for number, right in pairs)
    norm, loss = ((unpatched[step][which], whole[step][which]) for step, which in ((0, 1), (-1, 0)))
    return f"{norm[0]:.4f} for {norm[1]:.4f}", f"{loss[0]:.4f} for {loss[1]:.4f}", f"{farthest:.0e}"


def _qk_clip_cells(row: dict[str, Any]) -> tuple[str, str]:
    if "not run" in row:
        return "not run", "not run"
    unpatched = row["unpatched"]
    return unpatched if isinstance(unpatched, str) else f"{unpatched:.0e}", f"{row['patched']:.0e}"


def _qk_clip_training_cells(row: dict[str, Any]) -> tuple[str, str, str]:
    *main, head = row["logits"]
    return f"{row['loss']:.3f}", f"{max(main):.0f}", f"{head:.0f}"


def _layouts_cells(row: dict[str, Any]) -> tuple[str, ...]:
    if "not run" in row:
        return "", "", "", f"does not train: {row['not run']}"
    numbers = (f"{row[name]:.6f}" if name in row else "" for name in ("loss", "reference", "difference"))
    return (*numbers, row["resumes"] if row["resumes"] == "yes" else f"no: {row['resumes']}")


def _experts_cells(row: dict[str, Any]) -> tuple[str, str]:
    if "not run" in row:
        return "not run", "not run"
    if "apart" in row:
        return f"{row['apart']['unpatched']:.2g}", f"{row['apart']['patched']:.2g}"
    missing = [f"{name} {part:.4f}" for name, part in _parts(row, "unpatched").items() if abs(part - 1.0) > TOLERANCE]
    return ", ".join(missing) or "1", f"{max(abs(part - 1.0) for part in _parts(row, 'patched').values()):.0e}"


def _parts(row: dict[str, Any], side: str) -> dict[str, float]:
    """What is reported as parts of what is there; nothing of what was not measured."""
    return {
        name: part / whole
        for name, whole, part in zip(NORMS, row["by hand"], row[side], strict=True)
        if None not in (whole, part)
    }


def _megatrons(column: Column) -> str:
    names = []
    for versions in column["megatrons"]:
        te = versions.get("transformer-engine")
        names.append(f"{versions['megatron-core']}, TE {te}" if te else versions["megatron-core"])
    return ("; " if "TE" in names[0] else ", ").join(names)


def _torch(columns: list[Column]) -> str:
    return ", ".join(sorted({versions["torch"] for column in columns for versions in column["megatrons"]}))


class Evidence(NamedTuple):
    """A table, and the packages beside Megatron whose versions it names."""

    make: Callable[[list[Column]], Table]
    packages: tuple[str, ...]


TABLES = {
    "losses": Evidence(make_losses, ("torch",)),
    "experts": Evidence(make_experts, ("transformer-engine", "torch")),
    "repairs": Evidence(make_repairs, ("torch",)),
    "qk_clip_training": Evidence(make_qk_clip_training, ("transformer-engine", "torch")),
    "qk_clip": Evidence(make_qk_clip, ("transformer-engine", "torch")),
    "layouts": Evidence(make_layouts, ("transformer-engine", "torch")),
}
