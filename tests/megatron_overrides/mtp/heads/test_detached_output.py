"""The gradient of an MTP head passes through the output layer and none stays there, whatever layer it is."""

import pytest
import torch

from megatron_overrides.mtp.heads.detached_output import call_detached

pytestmark = [pytest.mark.forked("patched"), pytest.mark.guards("detach-mtp-heads")]


class Adapted(torch.nn.Module):
    """A linear layer in a wrapper without a `weight`, with a low-rank adapter beside it."""

    def __init__(self):
        super().__init__()
        self.base = torch.nn.Linear(4, 6)
        self.down, self.up = torch.nn.Linear(4, 2, bias=False), torch.nn.Linear(2, 6, bias=False)

    def forward(self, hidden, weight=None):
        weight = self.base.weight if weight is None else weight
        return torch.nn.functional.linear(hidden, weight, self.base.bias) + self.up(self.down(hidden))


@pytest.fixture
def hidden():
    torch.manual_seed(0)
    return torch.randn(3, 4, requires_grad=True)


@pytest.mark.parametrize("weight", [None, torch.nn.Parameter(torch.ones(6, 4))], ids=["own", "tied"])
def test_only_the_hidden_states_get_a_gradient(hidden, weight):
    layer = Adapted()
    expected = torch.autograd.grad(layer(hidden, weight=weight).sum(), hidden)[0]
    output = call_detached(layer, hidden, weight=weight)
    assert torch.equal(output, layer(hidden, weight=weight))
    output.sum().backward()
    assert torch.equal(hidden.grad, expected)
    assert all(parameter.grad is None for parameter in (*layer.parameters(), *([] if weight is None else [weight])))


def test_afterwards_the_layer_trains_as_before(hidden):
    layer = Adapted()
    before = dict(layer.named_parameters())
    call_detached(layer, hidden, weight=None)
    assert all(parameter is before[name] for name, parameter in layer.named_parameters())
    assert not layer._forward_pre_hooks and not layer._forward_hooks
    layer(hidden).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_hooks_that_gather_and_release_parameters_see_the_real_ones(hidden):
    """FSDP's hooks make the weight another object before the forward, and yet another after it."""
    layer, seen = torch.nn.Linear(4, 6, bias=False), []
    gathered, released = torch.nn.Parameter(torch.ones(6, 4)), torch.nn.Parameter(torch.zeros(6, 4))

    class Output(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, hidden, weight=None):
            return self.inner(hidden)

    output = Output()

    def gather(module, args):
        module.inner._parameters["weight"] = gathered

    def release(module, args, result):
        seen.append(module.inner._parameters["weight"])
        module.inner._parameters["weight"] = released

    output.register_forward_pre_hook(gather)
    output.register_forward_hook(release)
    call_detached(output, hidden, weight=None).sum().backward()
    assert torch.equal(hidden.grad, torch.full((3, 4), 6.0))  # computed with the gathered weight
    assert seen == [gathered] and layer.weight is released and gathered.grad is None


def test_an_error_in_the_forward_leaves_the_parameters_in_place(hidden):
    layer = torch.nn.Linear(5, 6)
    before = layer.weight
    with pytest.raises((RuntimeError, TypeError)):
        call_detached(layer, hidden, weight=None)
    assert layer.weight is before


def test_a_function_with_a_weight_is_accepted(hidden):
    def output_layer(hidden, weight):
        return hidden @ weight.T

    output_layer.weight = torch.nn.Parameter(torch.ones(6, 4))
    call_detached(output_layer, hidden, weight=None).sum().backward()
    assert output_layer.weight.grad is None and hidden.grad.any()
