"""Apex makes no difference to what is applied, with TransformerEngine beside it or without. It is a stand-in here."""

import megatron_mtp_patches
import pytest
from megatron_mtp_patches import rehearsal
from megatron_mtp_patches.catalog import CATALOG

from tests.conformance.expected import STATE
from tests.conformance.inspection import import_targets, problems, reports
from tests.stand_ins import importable_apex
from tests.warm.processes import run_ranks

pytestmark = pytest.mark.forked("torch")


def test_every_patch_is_applied_exactly_once_beside_apex():
    has_transformer_engine = rehearsal.with_transformer_engine()
    library = "transformer_engine" if has_transformer_engine else "apex"

    def import_megatron():
        importable_apex.install()
        megatron_mtp_patches.apply()
        import_targets()
        from megatron.core.models.gpt import gpt_layer_specs
        from megatron.core.optimizer import Adam

        assert Adam.__module__.startswith(f"{library}.")
        assert gpt_layer_specs.HAVE_TE is has_transformer_engine and gpt_layer_specs.HAVE_APEX
        states = reports()
        for patch in CATALOG:
            assert problems(patch, states[patch.id], STATE[patch.id]) == []

    (ended,) = run_ranks(1, import_megatron)  # a Megatron that is imported stays as it is
    assert ended.code == 0, ended.output
