"""With an optimizer on the CPU the first step after a load of the model alone starts from the loaded weights."""

import pytest

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("refresh-offloaded-params")]


@pytest.fixture
def load_and_step():
    """The weights of a bf16 model that a step with a learning rate of 0 leaves, after each was loaded as 2."""

    def run(main_params=None, **settings):
        import torch
        from megatron_mtp_patches.defects.labs import lab

        config = lab.make_config()
        model = lab.make_ddp(config, lab.make_gpt(config).bfloat16(), use_distributed_optimizer=True)
        is_offloaded = {"optimizer_cpu_offload": True, "bf16": True, "use_distributed_optimizer": True}
        optimizer = lab.make_optimizer(model, lr=0.0, **is_offloaded, **settings)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(2.0)
        state = None
        if main_params is not None:
            values = {name: value for name, value in model.module.state_dict().items() if value is not None}
            state = {"model": {name: torch.full_like(value, main_params) for name, value in values.items()}}
        optimizer.reload_model_params(state)
        lab.take_step(model, optimizer)
        return set(torch.cat([param.flatten() for param in model.parameters()]).tolist())

    return run


@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
def test_the_loaded_weights_stay(load_and_step, fraction):
    assert load_and_step(optimizer_offload_fraction=fraction) == {2.0}


def test_main_weights_of_a_checkpoint_take_the_place_of_the_models(load_and_step):
    assert load_and_step(main_params=3.0) == {3.0}


def test_a_precision_aware_optimizer_keeps_its_own_path(load_and_step):
    assert load_and_step(use_precision_aware_optimizer=True) == {2.0}
