"""`diagnose` names the defects that affect the configurations of a trainer without a command line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.forked("patched")


def test_configurations_are_diagnosed_as_flags_are():
    """TransformerConfig calls the number of experts otherwise than the command line."""
    import megatron_mtp_patches
    from megatron.core.optimizer import OptimizerConfig

    model = SimpleNamespace(num_moe_experts=8, tensor_model_parallel_size=2, optimizer=None)
    model.moe_grouped_gemm = True
    found = megatron_mtp_patches.diagnose(model, OptimizerConfig(optimizer="muon"), transformer_engine="2.16.1")
    patches = {finding.patch for finding in found}
    assert {"exempt-muon-from-clipping", "keep-newton-schulz-scale-invariant"} <= patches
    assert all(finding.is_removed for finding in found)


@pytest.mark.parametrize(
    "settings", [(), (None,), ({"mtp_num_layers": 2},), ([SimpleNamespace()],), (SimpleNamespace,)]
)
def test_what_is_no_configuration_is_refused(settings):
    import megatron_mtp_patches

    with pytest.raises(TypeError, match=r"diagnose\(\) takes Megatron's arguments or configurations, not "):
        megatron_mtp_patches.diagnose(*settings)


@pytest.mark.parametrize("version", ["abc", 2.13, (2, 13)])
def test_what_is_no_version_is_refused(version):
    import megatron_mtp_patches

    with pytest.raises(ValueError, match="is not a version of TransformerEngine"):
        megatron_mtp_patches.diagnose(SimpleNamespace(), transformer_engine=version)
