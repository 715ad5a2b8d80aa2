"""Apex makes no difference to what is applied, with TransformerEngine beside it or without. It is a stand-in here."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

import megatron_mtp_patches
import pytest
import torch
from megatron_mtp_patches import rehearsal
from megatron_mtp_patches.catalog import CATALOG

from tests.conformance.expected import STATE
from tests.conformance.inspection import import_targets, problems, reports
from tests.warm.processes import run_ranks

pytestmark = pytest.mark.forked("torch")
PACKAGES = {"apex", "amp_C", "fused_layer_norm_cuda"}


class Finder(MetaPathFinder, Loader):
    """Finds an Apex that has every name that is looked up in it, each with a capital letter as a class.

    Megatron checks if an import succeeds and derives from the classes that it finds; none of them computes anything.
    """

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in PACKAGES:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Module(spec.name)

    def exec_module(self, module):
        pass


class Module(ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name.islower():
            return import_module(f"{self.__name__}.{name}")
        stand_in = type(name, (torch.nn.Module,), {"__module__": self.__name__})
        setattr(self, name, stand_in)
        return stand_in


def test_every_patch_is_applied_exactly_once_beside_apex():
    has_transformer_engine = rehearsal.with_transformer_engine()
    library = "transformer_engine" if has_transformer_engine else "apex"

    def import_megatron():
        sys.meta_path.insert(0, Finder())
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
