"""Orthogonalize gradients of any size alike.

Upstream: NVIDIA-NeMo/Emerging-Optimizers, whose 0.4.0 lowers the floor from 1e-7 to 1e-15; the report is
    NVIDIA/Megatron-LM#5394.
Without it: newton_schulz of emerging_optimizers divides a matrix by its norm, but by no less than 1e-7. A gradient
    under that floor, clipped or just small, is not brought to unit size; from about 1e-9 on its update shrinks with it.
Adds: matrices whose norm is under the floor are first made larger by 2^60, on one rank and under tensor parallelism (in
    the one reduction that is there). So the floor is at 1e-25.
Changes numbers: of updates from gradients whose norm is under 1e-7; all others are the same to the bit.
"""

from .engine import Patch, Probe, PullRequest, Wrap

_MUON_UTILS = "emerging_optimizers.orthogonalized_optimizers.muon_utils"
_OVERRIDES = f"megatron_overrides.{_MUON_UTILS}"

PATCH = Patch(
    id="keep-newton-schulz-scale-invariant",
    doc=__doc__,
    upstream=(PullRequest(238, native_since="0.4.0", repository="NVIDIA-NeMo/Emerging-Optimizers"),),
    probe=Probe(f"{_MUON_UTILS}:newton_schulz", contains="normalize_in_double"),
    optional=True,
    edits=(
        Wrap(f"{_MUON_UTILS}:newton_schulz", f"{_OVERRIDES}:rescale_small_input", check_source=False),
        Wrap(f"{_MUON_UTILS}:distributed_normalize_p2", f"{_OVERRIDES}:normalize_with_rescaling", check_source=False),
    ),
)
