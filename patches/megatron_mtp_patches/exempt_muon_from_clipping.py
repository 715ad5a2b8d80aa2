"""Declares exempt-muon-from-clipping."""

from .engine import AddIfMissing, Patch, Probe, PullRequest
from .shared_edits import (
    CHECK_SETTINGS,
    GRAD_NORMS,
    OPTIMIZER,
    OPTIMIZER_STEP,
    SHOW_METRICS,
    add_optimizer_setting,
)

_ORTHOGONALIZED = "megatron_overrides.support.muon"

PATCH = Patch(
    id="exempt-muon-from-clipping",
    summary="Do not clip the gradients of Muon, nor clip or skip anything by their norm",
    upstream=(PullRequest(5395),),
    problem=(
        "One norm over all parameters decides how far each gradient is scaled down. Newton-Schulz discards the size "
        "of a gradient, so clipping cannot help Muon; but where one module's gradients explode, it pushes those of "
        "all others below the floor of the iteration. They stop learning, the norm grows, and nothing says so. Where "
        "one gradient is 1e12 times the others, the loss of a test stays at 96 % of its first value; with the patch "
        "it falls to 0.02 %."
    ),
    adds=(
        "`optimizer.skip_grad_norm_clip`: true for the Muon family (OrthogonalizedOptimizer of emerging_optimizers), "
        "false for Adam, SGD, SOAP and Lion. It can be set.",
        "The norms that clip, and that are compared with `--grad-norm-skip-threshold`, leave exempt parameters out, "
        "those of MTP heads too. A NaN or inf among them still skips the update.",
        "The reported grad norm is that of all parameters, as before. The log shows the norm that clips beside it.",
    ),
    repairs=(
        "LayerWise children on different ranks get one norm, not each its own.",
        "MTP heads under Muon do not clip those under Adam.",
        "There is no second reduction.",
        "An optimizer of another library needs no attribute.",
        "PolarGrad and MOP, which scale their update by the nuclear norm of the gradient, are still clipped.",
        "A threshold still catches NaN.",
    ),
    numerics=(
        "With Muon and `--clip-grad` > 0, as soon as the norm exceeds it. Momentum and Nesterov mix gradients of "
        "several steps, so unclipped steps weigh differently in that mixture. L2 (not decoupled) weight decay is "
        "added to the gradient before it is orthogonalized. The last digits of the reported norm change, which is "
        "then made of two sums."
    ),
    notes=("The report is NVIDIA/Megatron-LM#5394.",),
    probe=Probe(f"{OPTIMIZER}:MegatronOptimizer.skip_grad_norm_clip"),
    edits=(
        *add_optimizer_setting(
            "clip_orthogonalizing_optimizers",
            bool,
            False,
            "Clip the gradients of Muon and its family by the norm of all gradients, as Megatron does.",
        ),
        AddIfMissing(f"{OPTIMIZER}:MegatronOptimizer.skip_grad_norm_clip", f"{_ORTHOGONALIZED}:skip_grad_norm_clip"),
        AddIfMissing(
            f"{OPTIMIZER}:ChainedOptimizer.skip_grad_norm_clip", f"{_ORTHOGONALIZED}:skip_grad_norm_clip_of_chain"
        ),
        AddIfMissing(
            f"{OPTIMIZER}:ChainedOptimizer._get_grad_norm_over",
            "megatron_overrides.core.optimizer.clip_grads:_get_grad_norm_over",
        ),
        *CHECK_SETTINGS,
        *GRAD_NORMS,
        *OPTIMIZER_STEP,
        *SHOW_METRICS,
    ),
)
