"""The step that creates an optimizer's state changes no parameter, no setting and no count of steps."""

import pytest
import torch
from megatron_mtp_patches.engine.call import Call

from megatron_overrides.fsdp.fully_shard import create_state_without_a_step

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("count-no-step-in-fully-shard-optimizer")]


class CountingInGroups(torch.optim.SGD):
    """Counts its steps in its groups, as FusedAdam does."""

    def step(self):
        super().step()
        for group in self.param_groups:
            group["step"] = group.get("step", 0 * group["lr"]) + 1


class Refused(Exception):
    pass


def create_state(optimizer):
    """Stands for fully_shard_optimizer."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def refuse(optimizer):
    raise Refused


def call(wrapped, optimizer):
    return create_state_without_a_step(Call(wrapped, None, (), {"optimizer": optimizer}))


def make(kind=CountingInGroups, lr=0.1):
    return kind([torch.nn.Parameter(torch.ones(3))], lr=lr, weight_decay=0.5)


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["number", "tensor"])
def test_parameters_settings_and_the_count_of_a_group_stay(lr):
    optimizer = make(lr=lr)
    assert call(create_state, optimizer) is optimizer
    group = optimizer.param_groups[0]
    assert torch.equal(group["params"][0], torch.ones(3))
    assert group["lr"] is lr and group["weight_decay"] == 0.5
    assert group["step"] == 0 and type(group["step"]) is type(lr * 0)


@pytest.mark.parametrize("kind", [CountingInGroups, torch.optim.AdamW])
def test_an_optimizer_that_has_stepped_keeps_its_count(kind):
    optimizer = make(kind)
    for _ in range(3):
        create_state(optimizer)
    call(create_state, optimizer)
    places = [*optimizer.param_groups, *optimizer.state.values()]
    assert [place["step"] for place in places if "step" in place] == [3]


def test_settings_are_restored_after_an_error():
    optimizer = make()
    with pytest.raises(Refused):
        call(refuse, optimizer)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.1, 0.5)
