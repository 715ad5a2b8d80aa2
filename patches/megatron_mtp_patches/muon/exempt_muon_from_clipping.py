"""Declares exempt-muon-from-clipping."""

from ..declarations.settings import Setting, optimizer_setting
from ..declarations.shared_edits import GRAD_NORMS, OPTIMIZER, OPTIMIZER_STEP, SHOW_METRICS
from ..engine import Override, Patch, Probe, PullRequest

_ORTHOGONALIZED = "megatron_overrides.muon.exemption"

PATCH = Patch(
    id="exempt-muon-from-clipping",
    summary="Do not clip the gradients of Muon, nor clip or skip anything by their norm",
    upstream=(PullRequest(5395),),
    problem="Megatron scales all gradients by `clip_grad / norm`, with one norm over all parameters. Muon does not use "
    "the size of a gradient, so clipping cannot help it. But where the gradients of one module explode, the "
    "factor pushes those of all other modules below the floor (1e-7) under which Newton-Schulz no longer brings "
    "them to the same size. These modules stop learning, the norm grows, the factor shrinks further, and no "
    "number in the log shows it. Where one gradient is 1e12 times the others, the loss of a test stays at 96 % of "
    "its first value; with the patch it falls to 0.02 %.",
    adds=(
        "`optimizer.skip_grad_norm_clip`: true for the Muon family (`OrthogonalizedOptimizer` of "
        "emerging_optimizers), false for Adam, SGD, SOAP and Lion. It can be set.",
        "The norms that clip, and that are compared with `--grad-norm-skip-threshold`, leave exempt parameters out, "
        "also those of MTP heads (Megatron's MTP layers). If a threshold is set, a NaN or inf among them still skips "
        "the update, and so does a norm that overflows float32 (over 1.8e19).",
        "`grad norm` in the log is that of all parameters, as before; `clippable grad norm` beside it is the norm "
        "that clips.",
    ),
    repairs=(
        "LayerWise gives each rank the parameters of another optimizer. The pull request narrows the norm on the "
        "ranks of one model replica, so these ranks clip and skip by different norms: with Adam gradients of 30 on "
        "one rank and 0.4 on the other, by 30 and by 0.4. With this patch both get 30.0027.",
        "In the pull request MTP heads under Muon affect how the heads under Adam are clipped. With this patch their "
        "norm is narrowed as well.",
        "In the pull request a mixed chain pays for a second reduction. With this patch all norms come from the "
        "existing reduction; a chain that has only Muon measures the norms that it reports and nothing else.",
        "PolarGrad and MOP belong to the family, but scale their update by the nuclear norm of the gradient. With "
        "this patch they are clipped.",
        "In the pull request a threshold does not see NaN in exempt gradients. With this patch it does.",
        "In the pull request an optimizer of another library that lacks the attribute raises an error. With this "
        "patch it needs none.",
    ),
    numerics="With Muon and `--clip-grad` > 0, everything changes as soon as the norm exceeds it. A single step of "
    "Muon does not depend on the size of the gradient. But its momentum and Nesterov mix gradients of several steps, "
    "and without clipping a large gradient has more weight in that mixture. L2 (not decoupled) weight decay is added "
    "to the gradient before it is orthogonalized, so there the size also matters. In a chain of exempt and other "
    "optimizers the last digits of the reported `grad norm` change, because it is now made of two sums.",
    unasked="Muon is not clipped, and its norm clips and skips nothing. Upstream has not merged this change.",
    turned_off_by="`--clip-orthogonalizing-optimizers`",
    notes=("The report is NVIDIA/Megatron-LM#5394.",),
    probe=Probe(f"{OPTIMIZER}:MegatronOptimizer.skip_grad_norm_clip"),
    edits=(
        *optimizer_setting(
            Setting(
                "clip_orthogonalizing_optimizers",
                bool,
                False,
                "Clip the gradients of Muon and its family by the norm of all gradients, as Megatron does.",
            )
        ),
        Override(
            f"{OPTIMIZER}:MegatronOptimizer.skip_grad_norm_clip",
            f"{_ORTHOGONALIZED}:skip_grad_norm_clip",
            where="missing",
        ),
        Override(
            f"{OPTIMIZER}:ChainedOptimizer.skip_grad_norm_clip",
            f"{_ORTHOGONALIZED}:skip_grad_norm_clip_of_chain",
            where="missing",
        ),
        Override(
            f"{OPTIMIZER}:ChainedOptimizer._get_grad_norm_over",
            "megatron_overrides.norms.measuring:_get_grad_norm_over",
            where="missing",
        ),
        *GRAD_NORMS,
        *OPTIMIZER_STEP,
        *SHOW_METRICS,
    ),
)
