"""What is left alone, and what is refused. That it trains is shown in tests/multirank/fsdp/test_fsdp.py."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from megatron_mtp_patches.engine.call import Call

from megatron_overrides.fsdp.gradient_sums import sum_gradients_in_fp32
from megatron_overrides.fsdp.main_weights import build_without_master_weights, reload_main_weights

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("fsdp-without-master-weights")]


def build(inner, chunk, **config):
    settings = SimpleNamespace(**{"use_precision_aware_optimizer": True, **config})
    built = SimpleNamespace(optimizer=inner)

    def original(config, model_chunks, param_groups):
        return built

    assert build_without_master_weights(
        Call(original, None, (settings,), {"model_chunks": [chunk], "param_groups": []})
    ) is (built)
    return vars(inner) if inner else None


def fused_adam():
    return SimpleNamespace(master_weights=True, store_param_remainders=True, use_decoupled_grad=False)


def chunk_of(use_megatron_fsdp, **more):
    return SimpleNamespace(ddp_config=SimpleNamespace(use_megatron_fsdp=use_megatron_fsdp), **more)


@pytest.mark.parametrize(
    "chunk, config",
    [
        (SimpleNamespace(), {}),  # a model that nothing wraps
        (chunk_of(False), {}),
        (chunk_of(True), {}),  # version 2 has no such buffer
        (chunk_of(True, param_and_grad_buffer=SimpleNamespace()), {"use_precision_aware_optimizer": False}),
    ],
)
def test_other_models_keep_their_master_weights(chunk, config):
    assert build(fused_adam(), chunk, **config) == vars(fused_adam())


@pytest.mark.parametrize("inner", [None, SimpleNamespace(), SimpleNamespace(master_weights=None)])
def test_an_optimizer_without_master_weights_still_finds_its_gradients_where_they_were(inner):
    """No optimizer at all on a rank where all is frozen; others read `grad`, or either."""
    buffer = SimpleNamespace()
    before = dict(vars(inner)) if inner else None
    assert build(inner, chunk_of(True, param_and_grad_buffer=buffer)) == before
    assert vars(buffer) == {}


def reload(buffer, chunk=None, use_megatron_fsdp=True, optimizer=None):
    model = SimpleNamespace(is_param_fsdp_distributed=False, synchronize_param_gather=lambda: None)
    instance = SimpleNamespace(
        ddp_config=SimpleNamespace(use_megatron_fsdp=use_megatron_fsdp),
        model_chunks=[SimpleNamespace(module=model, param_and_grad_buffer=buffer)],
        optimizer=optimizer,
    )
    return reload_main_weights(
        Call(lambda *args, **kwargs: ("original", args, kwargs), instance, (), {"state_dict": 1})
    )


def flat_buffer(data):
    return SimpleNamespace(
        is_data_distributed=True, param_idx={"p": 0}, get_item=lambda place, only_shard: data, data=data
    )


def group_of_one(main, model):
    return SimpleNamespace(
        parameter_groups=[SimpleNamespace(params=["p"], main_weight_buffer=main, model_weight_buffer=model)]
    )


def test_quantized_model_weights_are_refused():
    buffer = group_of_one(flat_buffer(torch.ones(2)), flat_buffer(torch.ones(2, dtype=torch.uint8)))
    with pytest.raises(NotImplementedError, match="change the parameters that model.state_dict.. shows"):
        reload(buffer)


def test_without_main_weights_there_is_nothing_to_copy():
    reload(group_of_one(None, flat_buffer(torch.ones(2))))


def test_an_offloading_optimizer_renews_its_copies():
    renewed = []
    reload(
        SimpleNamespace(parameter_groups=[]),
        optimizer=SimpleNamespace(update_fp32_param_by_new_param=lambda: renewed.append(1)),
    )
    assert renewed == [1]


def test_other_models_reload_as_they_did():
    assert reload(None, use_megatron_fsdp=False) == ("original", (), {"state_dict": 1})


@dataclass
class DDPConfig:
    grad_reduce_in_fp32: bool = True
    megatron_fsdp_main_grads_dtype: torch.dtype | None = None


@pytest.mark.parametrize(
    "params_dtype, ddp_config, is_said",
    [
        (torch.bfloat16, DDPConfig(), True),
        (torch.bfloat16, DDPConfig(megatron_fsdp_main_grads_dtype=torch.bfloat16), False),
        (torch.bfloat16, DDPConfig(grad_reduce_in_fp32=False), False),
        (torch.float32, DDPConfig(), False),
    ],
)
def test_the_log_says_where_gradients_take_more_memory(params_dtype, ddp_config, is_said, caplog):
    """On 0.19.2 and main, where sum-fsdp-gradients-in-fp32 sets what 0.18 has."""

    def original(config, ddp_config):
        pass

    config = SimpleNamespace(params_dtype=params_dtype)
    sum_gradients_in_fp32(Call(original, None, (config, ddp_config), {}))
    assert ("4 bytes for each parameter" in caplog.text) is is_said
