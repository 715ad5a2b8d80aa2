"""Refuse to split fused weights where nothing would be split, or only at half."""

from __future__ import annotations

from typing import Any

from megatron_overrides.settings.checks import spell

SPLITS = {
    "muon_split_glu": "gated MLP (--swiglu)",
    "muon_split_qkv_per_head": "attention layer with query, key and value in linear_qkv, or multi-latent attention",
    "muon_split_gdn": "GatedDeltaNet (--experimental-attention-variant gated_delta_net)",
}
_MUON = ("muon", "adaptive_muon")
# 0.16 and 0.17 call a configuration Adam's before they make Muon of it: they have it from then on.
MAKES_MUON = "_makes_muon"


def asked_splits(settings: Any) -> list[str]:
    """The settings of this project that are on in `settings`; not those that this Megatron has itself."""
    return [name for name in SPLITS if getattr(settings, name, False) is True and _is_added(name)]


def _is_added(name: str) -> bool:
    from megatron.core.optimizer import OptimizerConfig

    field = OptimizerConfig.__dataclass_fields__.get(name)
    return field is not None and "added_in_place" in field.metadata


def check_muon_splits(settings: Any) -> None:
    """Raise ValueError unless the optimizer of `settings` can split what they ask for.

    Args:
        settings: Megatron's arguments, or the configuration of an optimizer that is about to be made.
    """
    for name in asked_splits(settings):
        optimizer = getattr(settings, "optimizer", None)
        if str(optimizer).removeprefix("dist_") not in _MUON and not getattr(settings, MAKES_MUON, False):
            raise ValueError(
                f"{spell(name)} splits what Muon orthogonalizes, but the optimizer is {optimizer}: leave it out, or "
                f"train with --optimizer dist_muon or muon"
            )
        if name == "muon_split_qkv_per_head" and not getattr(settings, "muon_split_qkv", True):
            raise ValueError(
                f"{spell(name)} splits query, key and value further, but --muon-no-split-qkv (config.muon_split_qkv) "
                f"leaves them together: leave one of the two out"
            )
