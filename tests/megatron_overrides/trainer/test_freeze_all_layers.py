"""--freeze-all-layers freezes whatever DDP wraps."""

import sys
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("freeze-all-layers")]


@pytest.fixture
def run_of(monkeypatch):
    """run_of(**flags): from now on this is a run of Megatron's trainer with these flags."""

    def run(**flags):
        trainer = SimpleNamespace(_GLOBAL_ARGS=SimpleNamespace(**flags))
        monkeypatch.setitem(sys.modules, "megatron.training.global_vars", trainer)

    return run


@pytest.fixture
def wrap(run_of):
    """wrap(**flags): a model of two layers in DDP, in a run with these flags."""

    def run(**flags):
        import torch
        from megatron_mtp_patches.defects.labs.lab import make_config, make_ddp

        run_of(**flags)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[0].frozen_expert_bias = False
        make_ddp(make_config(), model)
        return model

    return run


@pytest.mark.parametrize(
    "flags, is_frozen", [({}, False), ({"freeze_all_layers": False}, False), ({"freeze_all_layers": True}, True)]
)
def test_the_flag_freezes_all_weights_and_expert_biases(wrap, flags, is_frozen):
    model = wrap(**flags)
    assert {param.requires_grad for param in model.parameters()} == {not is_frozen}
    assert model[0].frozen_expert_bias is is_frozen


@pytest.mark.parametrize(
    "wrapper",
    [
        "torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel",
        "fsdp.mcore_fsdp_adapter:FullyShardedDataParallel",
    ],
)
def test_a_model_is_frozen_before_it_is_sharded(run_of, wrapper):
    import torch

    run_of(freeze_all_layers=True)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(AttributeError):
        resolve_name(f"megatron.core.distributed.{wrapper}")(config=None, ddp_config=None, module=model)
    assert not model.weight.requires_grad
