"""Code that reproductions of Megatron's trainer share. The trainer is in the wheels from 0.17 on."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from io import StringIO
from types import SimpleNamespace
from typing import Any

from .lab import LENGTH, VOCABULARY


class TrainingLog:
    """The log of Megatron's trainer for a run with these flags."""

    def __init__(self, flags: str, interval: int = 1) -> None:
        from megatron.training import arguments, global_vars

        sizes = f"--num-attention-heads 4 --hidden-size 16 --seq-length {LENGTH} --max-position-embeddings {LENGTH}"
        others = "--micro-batch-size 1 --train-iters 9 --lr 1e-2 --position-embedding-type rope"
        sys.argv = ["train", *f"{sizes} {others} {flags}".split()]
        args = arguments.parse_args()
        arguments.validate_args(args)
        args.padded_vocab_size, args.log_interval = VOCABULARY, interval
        global_vars.set_global_variables(args, build_tokenizer=False)
        global_vars.get_timers()("interval-time", log_level=0).start()
        self.totals: dict[str, Any] = {}

    def add_step(
        self, iteration: int, is_taken: bool = True, losses: dict[str, Any] | None = None, is_first: bool = False
    ) -> dict[str, float]:
        """The numbers of the line that is printed for this step, by name; none between two lines.

        `losses` are those of the step, by name, each of the form [1]. The step `is_first` if the process took none yet.
        """
        from megatron.training.training import training_log

        with redirect_stdout(StringIO()) as printed:
            arguments = (losses or {}, self.totals, 1e-2, iteration, 1.0, False, int(not is_taken), *[None] * 4)
            training_log(*arguments, is_first_iteration=is_first)
        pairs = (part.rpartition(":") for part in printed.getvalue().split("|"))
        return {name.strip(): float(number) for name, _, number in pairs if name and "[" not in name}


def norm_of_weights(model: Any, bf16: bool) -> float:
    """The norm of the weights that the trainer logs, in a run with or without --bf16."""
    from megatron.training.utils import calc_params_l2_norm

    trainer = sys.modules[calc_params_l2_norm.__module__]
    trainer.get_args = lambda: SimpleNamespace(bf16=bf16, use_megatron_fsdp=False)  # type: ignore[attr-defined]
    return float(calc_params_l2_norm(model))
