"""Declares keep-newton-schulz-scale-invariant."""

from .engine import Patch, Probe, PullRequest, Wrap

_MUON_UTILS = "emerging_optimizers.orthogonalized_optimizers.muon_utils"
_OVERRIDES = f"megatron_overrides.{_MUON_UTILS}"

PATCH = Patch(
    id="keep-newton-schulz-scale-invariant",
    summary="Orthogonalize gradients of any size alike",
    upstream=(PullRequest(238, native_since="0.4.0", repository="NVIDIA-NeMo/Emerging-Optimizers"),),
    optional=True,
    problem=(
        "`newton_schulz` of emerging_optimizers divides a matrix by its norm, but by no less than 1e-7. A gradient "
        "below that floor, clipped or just small, is not brought to unit size; from about 1e-9 on its update shrinks "
        "with it."
    ),
    adds=(
        "A matrix whose norm is below the floor is first multiplied by 2^60, on one rank and under tensor parallelism "
        "(in the one reduction that is there). So the floor is at 1e-25.",
    ),
    numerics="Of updates from gradients whose norm is under 1e-7. All others are the same to the bit.",
    notes=(
        "It patches emerging_optimizers, whose 0.4.0 lowers the floor to 1e-15. Where that package is not installed, "
        "the patch is pending.",
        "The report is NVIDIA/Megatron-LM#5394.",
    ),
    probe=Probe(f"{_MUON_UTILS}:newton_schulz", contains="normalize_in_double"),
    edits=(
        Wrap(f"{_MUON_UTILS}:newton_schulz", f"{_OVERRIDES}:rescale_small_input", check_source=False),
        Wrap(f"{_MUON_UTILS}:distributed_normalize_p2", f"{_OVERRIDES}:normalize_with_rescaling", check_source=False),
    ),
)
