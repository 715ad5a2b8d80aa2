"""pretrain_gpt.py of a tree of Megatron-LM, with the numbers of each step.

    python -m megatron_mtp_patches run --device cuda scripts/gpu/training.py RESULT TREE FLAGS

RESULT is written after each step: the main loss, the sum of each head's losses and the gradient norm, as the trainer's
train_step returns them, and milliseconds between CUDA events before and after it.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scripts.common.megatron_trainer import PLAIN_MODULES, spare_helper_build

# 0.8 B parameters on a GPU. Attention that is not fused holds its matrices, hence one sequence at a time without it.
SIZES = {
    "gpu": "--num-layers 24 --hidden-size 1536 --num-attention-heads 16 --seq-length 4096 --vocab-size 32767 "
    "--max-position-embeddings 4096 --train-iters 30",
    "cpu": "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --vocab-size 127 "
    "--max-position-embeddings 32 --train-iters 4",
}
COMMON = (
    "--bf16 --use-distributed-optimizer --mtp-num-layers 1 --untie-embeddings-and-output-weights --seed 1234 "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --lr 1e-4 --min-lr 1e-5 "
    "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --log-interval 1 --eval-interval 100000 --eval-iters 1 "
    "--mock-data --num-workers 0 --split 99,1,0 --tokenizer-type NullTokenizer"
)
FUSED = "--micro-batch-size 4 --global-batch-size 8"
UNFUSED = f"--micro-batch-size 1 --global-batch-size 2 {PLAIN_MODULES}"
GRAD_NORM = 5  # its place in what train_step returns


def flags_of(device: str, more: str = "") -> list[str]:
    """The flags of the training on "gpu" or "cpu", with TransformerEngine's layers where a GPU has them."""
    batch = FUSED if device == "gpu" and find_spec("transformer_engine") else UNFUSED
    return f"{SIZES[device]} {batch} {COMMON} {more}".split()


def record_steps(train_step: Callable[..., Any], file: Path, record: dict[str, Any]) -> Callable[..., Any]:
    """`train_step`, which also adds its numbers to `record` and writes that to `file`."""
    import torch
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    def recorded(*args: Any, **kwargs: Any) -> Any:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        returned = train_step(*args, **kwargs)
        end.record()
        end.synchronize()
        (loss,) = returned[0].values()
        heads = MTPLossLoggingHelper.tracker.get("values")
        record["steps"].append(
            {
                "ms": start.elapsed_time(end),
                "loss": float(loss),
                "heads": [] if heads is None else heads.flatten().tolist(),
                "norm": None if returned[GRAD_NORM] is None else float(returned[GRAD_NORM]),
            }
        )
        record["peak bytes"] = torch.cuda.max_memory_allocated()
        file.write_text(json.dumps(record), encoding="utf-8")
        return returned

    return recorded


def main() -> None:
    file, tree, *flags = sys.argv[1:]
    sys.path.insert(0, tree)
    import torch
    from megatron.core import package_info
    from megatron.training import training

    spare_helper_build()
    versions = {"megatron": package_info.__version__, "torch": torch.__version__}
    about = {"flags": " ".join(flags), "patches": os.environ["MEGATRON_MTP_PATCHES"], "versions": versions}
    record: dict[str, Any] = {**about, "peak bytes": 0, "steps": []}
    training.train_step = record_steps(training.train_step, Path(file), record)
    script = Path(tree, "pretrain_gpt.py")
    sys.argv = [str(script), *flags]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
