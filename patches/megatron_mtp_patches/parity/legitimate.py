"""What depends on the cut of a run because Megatron defines it so: shown with its reason, never a finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from .comparison import Deviation


@dataclass(frozen=True)
class Dependence:
    """Quantities that Megatron defines by rank or by microbatch.

    Attributes:
        reason: why they depend on the cut, as a sentence without a full stop.
        covers: whether a deviation is one of them.
        acts: whether a run with these settings has them.
    """

    reason: str
    covers: Callable[[Deviation], bool]
    acts: Callable[[Any], object] = lambda run: True


def _is_log(*names: str) -> Callable[[Deviation], bool]:
    return lambda deviation: deviation.kind == "log" and any(name in deviation.name for name in names)


def _is_any(deviation: Deviation) -> bool:
    return True


ROUNDING = 2.0**-5  # more than sums of four ranks in bfloat16 change the norm of a gradient

DEPENDENCES = (
    Dependence(
        "some of Megatron's optimizers count the zeros of gradients for the log, and others do not",
        lambda deviation: _is_log("zeros")(deviation) and deviation.size == inf,
    ),
    Dependence("zeros of a gradient are counted exactly, and sums in another order are other zeros", _is_log("zeros")),
    Dependence(
        "the global auxiliary loss takes the counts of the microbatches so far, of which replicas have fewer",
        _is_any,
        lambda run: "global_aux_loss" in (run.moe_router_load_balancing_type or ()) and run.data_parallel_size > 1,
    ),
    Dependence(
        "sinkhorn balances experts over the tokens that a rank has, of which SP and CP leave it a part",
        _is_any,
        lambda run: (
            "sinkhorn" in (run.moe_router_load_balancing_type or ())
            and (run.sequence_parallel or run.context_parallel_size > 1)
        ),
    ),
    Dependence(
        "an expert has room for a part of the tokens of its rank, so a cut drops others",
        _is_any,
        lambda run: run.moe_expert_capacity_factor,
    ),
    Dependence(
        "--muon-tp-mode blockwise orthogonalizes the part of a matrix that a rank has",
        lambda deviation: deviation.kind == "update" or deviation.step > 1 or deviation.name == "params norm",
        lambda run: "muon" in run.optimizer and run.muon_tp_mode == "blockwise" and run.tensor_model_parallel_size > 1,
    ),
    Dependence(
        "--grad-reduce-in-bf16 adds the gradients of ranks in bfloat16",
        lambda deviation: deviation.size < ROUNDING,
        lambda run: run.grad_reduce_in_bf16 and (run.bf16 or run.use_megatron_fsdp) and run.world_size > 1,
    ),
)


def find_dependence(deviation: Deviation, settings: object) -> Dependence | None:
    """The dependence that a deviation is, in a run with these settings."""
    return next((one for one in DEPENDENCES if one.covers(deviation) and one.acts(settings)), None)
