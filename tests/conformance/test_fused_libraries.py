"""TransformerEngine and Apex make no difference to what is applied. There are stand-ins of them here."""

from __future__ import annotations

import fused_libraries
import megatron_mtp_patches
import pytest
from megatron_mtp_patches.catalog import CATALOG

from tests.warm.processes import run_ranks

from .expected import STATE
from .inspection import import_targets, problems, reports

pytestmark = pytest.mark.forked("torch")


@pytest.mark.parametrize(
    "libraries, adam, has_transformer_engine",
    [
        (["transformer_engine", "apex"], "transformer_engine.pytorch.optimizers", True),
        (["apex"], "apex.optimizers", False),
    ],
    ids=["both", "Apex alone"],
)
def test_every_patch_is_applied_exactly_once_beside(libraries, adam, has_transformer_engine):
    def import_megatron():
        fused_libraries.install(*libraries)
        megatron_mtp_patches.apply()
        import_targets()
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.optimizer import Adam

        assert Adam.__module__ == adam
        assert gpt_layer_specs.HAVE_TE is has_transformer_engine and gpt_layer_specs.HAVE_APEX
        found = reports()
        for patch in CATALOG:
            assert problems(patch, found[patch.id], STATE[patch.id]) == []

    (ended,) = run_ranks(1, import_megatron)  # a Megatron that is imported stays as it is
    assert ended.code == 0, ended.output
