"""The settings of a run in words: its arguments, and the defaults of fields that no argument sets."""

from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace

import pytest
from megatron_mtp_patches.engine import UsageError
from megatron_mtp_patches.parity.upgrade import reading

pytestmark = pytest.mark.forked("python")


class Backend(Enum):
    fused = 5


def activation(value):
    return value


@dataclass
class Configuration:
    lr: float
    clip_grad: float = 1.0
    backend: Backend = Backend.fused
    modules: list = field(default_factory=list)


def test_an_argument_counts_more_than_the_default_of_its_field(monkeypatch):
    monkeypatch.setattr(reading, "CONFIGURATIONS", {"optimizer": f"{__name__}:Configuration"})
    arguments = SimpleNamespace(
        clip_grad=0.5, activation=activation, rank=object(), _private=1, megatron_mtp_patches=""
    )
    assert reading._describe_settings([arguments]) == {
        "clip_grad": ("0.5", "optimizer"),
        "backend": ("fused", "optimizer"),
        "modules": ("[]", "optimizer"),
        "activation": (f"{__name__}.activation", "trainer"),
        "rank": ("<object object>", "trainer"),
    }


def test_a_spec_that_megatron_lacks_is_refused():
    for spec in (None, ["megatron.core.models.gpt.gpt_layer_specs", "spec"], ["my_layers", "spec"]):
        reading._check_spec(SimpleNamespace(spec=spec))
    with pytest.raises(UsageError, match=r"--spec megatron\.core\.no_layers: this Megatron has no such module"):
        reading._check_spec(SimpleNamespace(spec=["megatron.core.no_layers", "spec"]))
