"""Declares keep-newton-schulz-scale-invariant."""

from ..engine import Patch, Probe, PullRequest, Wrap

_MUON_UTILS = "emerging_optimizers.orthogonalized_optimizers.muon_utils"
_WRAPPERS = "megatron_overrides.muon.newton_schulz"

PATCH = Patch(
    id="keep-newton-schulz-scale-invariant",
    summary="Orthogonalize gradients of any size alike",
    upstream=(PullRequest(238, native_since="0.4.0", repository="NVIDIA-NeMo/Emerging-Optimizers"),),
    package="emerging-optimizers",
    problem="`newton_schulz` of emerging_optimizers (up to 0.3.1) divides a matrix by its norm, but by no less than "
    "1e-7. A gradient below that floor, because it was clipped or is just small, is not brought to unit size. Five "
    "steps of the iteration make up for a factor of about 490; below that, from about 1e-9 on, the update shrinks "
    "with the gradient.",
    adds=(
        "A matrix whose norm is below the floor is first multiplied by 2^60, which changes no digit of it. So its "
        "update is the same, to the bit, as that of the larger matrix, and the floor is at 1e-25. This works on one "
        "rank, in batches, and in `distributed` tensor parallelism, where the existing reduction carries both norms, "
        "without a host-device sync.",
    ),
    numerics="Updates from gradients whose norm is below 1e-7 change. All others are the same to the bit.",
    notes=(
        "It patches emerging_optimizers, the package from which Megatron takes Muon. Its 0.4.0 lowers the floor to "
        "1e-15 and can compute the norm in float64, so the patch does nothing there. If the package is not installed, "
        "the patch is pending.",
        "The report is NVIDIA/Megatron-LM#5394.",
    ),
    is_repair=True,
    probe=Probe(f"{_MUON_UTILS}:newton_schulz", contains="normalize_in_double"),
    edits=(
        Wrap(f"{_MUON_UTILS}:newton_schulz", f"{_WRAPPERS}:rescale_small_input", check_source=False),
        Wrap(f"{_MUON_UTILS}:distributed_normalize_p2", f"{_WRAPPERS}:normalize_with_rescaling", check_source=False),
    ),
)
