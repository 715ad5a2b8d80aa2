"""How parameters are left out of an update, and how their optimizer state keeps in step."""

from types import SimpleNamespace

import pytest
import torch

from megatron_overrides.norms.dropped_gradients import drop_gradients, keep_in_step

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("clip-mtp-grads-separately")]


def make_params(number):
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(number)]
    for param in params:
        param.grad = torch.ones(2)
    return params


def test_a_dropped_parameter_has_no_gradient_of_either_kind():
    plain, precise = make_params(2)
    precise.decoupled_grad = torch.ones(2)
    drop_gradients([plain, precise], torch.optim.SGD([plain, precise], lr=0.1))
    assert plain.grad is precise.grad is precise.decoupled_grad is None


def test_the_copies_of_an_offloading_optimizer_forget_the_step_before():
    """HybridDeviceOptimizer steps its copies by the gradients they have. A rehearsal cannot run it: all is "cuda"."""
    on_gpu, offloaded, kept, cpu_copy, fp32_copy, other_copy = make_params(6)
    hybrid = SimpleNamespace(
        gpu_params_map_cpu_copy={offloaded: cpu_copy, kept: other_copy},
        param_to_fp32_param={on_gpu: fp32_copy},
        cpu_copy_map_grad={cpu_copy: cpu_copy.grad, other_copy: other_copy.grad},
    )
    drop_gradients([on_gpu, offloaded], hybrid)
    assert cpu_copy.grad is fp32_copy.grad is None and kept.grad is not None and other_copy.grad is not None
    assert list(hybrid.cpu_copy_map_grad) == [other_copy]


def stepped(*, without):
    """Adam after three steps in which the parameters at `without` had no gradient."""
    params = make_params(3)
    for place in without:
        params[place].grad = None
    adam = torch.optim.AdamW(params, lr=0.1)
    for _ in range(3):
        adam.step()
    return adam, params


def test_heads_that_never_had_a_gradient_have_taken_as_many_steps_as_the_main_model():
    adam, (_, old_head, new_head) = stepped(without=[2])
    adam.state[old_head]["step"] -= 1  # not counted yet, unlike the main model's
    leaf = SimpleNamespace(optimizer=adam, config=None, init_state_fn=lambda adam, config: None)
    keep_in_step([new_head, old_head], leaf)
    assert [int(adam.state[param]["step"]) for param in (new_head, old_head)] == [3, 3]


def test_state_is_created_where_there_is_none_and_a_function_for_it():
    adam, (_, head, new_head) = stepped(without=[2])
    created = []
    leaf = SimpleNamespace(optimizer=adam, config=None, init_state_fn=lambda adam, config: created.append(adam))
    keep_in_step([head], leaf)
    assert created == []
    keep_in_step([new_head], leaf)
    assert created == [adam]
    del leaf.init_state_fn, adam.state[new_head]
    keep_in_step([new_head], leaf)
    assert int(adam.state[new_head]["step"]) == 3


def test_the_names_of_newer_releases_are_in_megatron_s_module():
    from megatron.core.optimizer import optimizer

    assert (optimizer.MTP_GRAD_NORM_GROUP, optimizer.GRAD_NORM_GROUP_ATTR) == ("mtp", "grad_norm_group")
    assert tuple(optimizer.SEPARATE_GRAD_NORM_GROUPS) == ("mtp",)
    assert callable(optimizer.copy_optimizer_param_metadata)
