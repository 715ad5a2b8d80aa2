"""Do not clip the gradients of Muon, nor clip or skip anything by their norm.

Upstream: NVIDIA/Megatron-LM#5395, open; the report is #5394.
Without it: one norm over all parameters decides how far each gradient is scaled down. Newton-Schulz throws the size of
    a gradient away, so clipping cannot help Muon; but where one module's gradients are very large, it pushes those of
    all others under the floor of the iteration. They stop learning, the norm grows, and nothing says so.
Adds: `optimizer.skip_grad_norm_clip`, true for the Muon family (OrthogonalizedOptimizer of emerging_optimizers), false
    for Adam, SGD, SOAP and Lion; settable. The norms that clip and that are held against --grad-norm-skip-threshold
    leave exempt parameters out, those of MTP heads too; a NaN or inf among them still skips the update.
    `--clip-orthogonalizing-optimizers` clips them all the same. The reported grad norm is that of all parameters, as
    before; beside it the log has the one that clips.
Better than the pull request: LayerWise children on different ranks get one norm, not each its own; MTP heads under Muon
    do not clip those under Adam; no second reduction; optimizers of somebody else's need no attribute; PolarGrad and
    MOP, which scale their update by the gradient's nuclear norm, are still clipped; a threshold still catches NaN.
Changes numbers: with Muon and --clip-grad > 0, as soon as the norm exceeds it. Momentum and Nesterov mix gradients of
    several steps, so unclipped steps also weigh differently in that mixture; L2 (not decoupled) weight decay adds to
    the gradient before it is orthogonalized. Last digits of the reported norm, which is then made of two sums.
"""

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
    doc=__doc__,
    upstream=(PullRequest(5395),),
    probe=Probe(f"{OPTIMIZER}:MegatronOptimizer.skip_grad_norm_clip"),
    repairs=True,
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
