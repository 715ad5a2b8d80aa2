"""A small net under Megatron-FSDP, and the same training in plain PyTorch."""

import pytest
import torch
import torch.distributed as dist

LR, WEIGHT_DECAY, CLIP = 0.05, 0.1, 1.0
STRATEGIES = ("optim", "optim_grads", "optim_grads_params")
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)
# Gradients are reduced, and weights gathered, beside the backward pass or after it.
strategies_and_overlaps = pytest.mark.parametrize(
    "overlap, strategy", [(True, "optim"), (False, "optim_grads"), (True, "optim_grads_params")]
)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(5, 9)
        self.down = torch.nn.Linear(9, 5)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def make_net(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block(), torch.nn.Linear(5, 1)).to(dtype)


def batch_of(step, rank, dtype):
    """The first column is zero: so are its gradients in the first layer."""
    torch.manual_seed(100 * step + rank)
    x = torch.randn(6, 5)
    x[:, 0] = 0.0
    return x.to(dtype)


def loss_of(net, x):
    return (net(x) - x.sum(dim=-1, keepdim=True)).float().square().mean()


def backward(training, step):
    """The loss of this rank, with gradients where the optimizer finds them."""
    training.optimizer.zero_grad()
    if training.model.ddp_config.overlap_grad_reduce:
        with training.model.no_sync():
            pass  # as Megatron's schedules leave it before the last microbatch
    loss = loss_of(training.model, batch_of(step, dist.get_rank(), training.dtype))
    loss.backward()
    training.model.finish_grad_sync()
    return float(loss)


def train(training, steps):
    """[(loss of this rank, norm, zeros)] of each step."""
    seen = []
    for step in steps:
        loss = backward(training, step)
        updated, norm, zeros = training.optimizer.step()
        seen.append((loss, float(norm), int(zeros)) if updated else None)
    return seen


def whole(training, what=lambda param: param._local_tensor):
    """{name: every rank's elements in a row} of the main weights, or of what `what` takes from each."""
    parts = {}
    for name, param in training.model.module.param_and_grad_buffer.optimizer_named_parameters:
        ranks = [None] * dist.get_world_size()
        part = what(param)
        dist.all_gather_object(ranks, None if part is None else part.detach().float().flatten())
        parts[name] = torch.cat([torch.empty(0), *(part for part in ranks if part is not None)])
    return parts


def gradient(param):
    grad = getattr(param, "decoupled_grad", None)
    return grad if grad is None else grad._local_tensor


class Reference:
    """The same training in plain PyTorch: fp32 weights, gradients in the model's dtype, torch's AdamW."""

    def __init__(self, dtype):
        self.net = make_net(dtype)
        self.dtype = dtype
        self.weights = {name: param.detach().float().clone() for name, param in self.net.named_parameters()}
        self.adam = torch.optim.AdamW(self.weights.values(), lr=LR, weight_decay=WEIGHT_DECAY)

    def start_from(self, weights):
        with torch.no_grad():
            for name, param in self.net.named_parameters():
                self.weights[name].copy_(weights[name])
                param.copy_(weights[name])

    def gradients(self, step):
        """The loss of this rank; the mean of all ranks' gradients is left in the weights."""
        ranks = dist.get_world_size()
        losses = []
        for rank in range(ranks):
            self.net.zero_grad()
            loss = loss_of(self.net, batch_of(step, rank, self.dtype))
            loss.backward()
            losses.append(float(loss))
            for name, param in self.net.named_parameters():
                before = self.weights[name].grad if rank else 0.0
                self.weights[name].grad = before + param.grad.float() / ranks
        return losses[dist.get_rank()]

    def clip(self):
        grads = torch.cat([weight.grad.flatten() for weight in self.weights.values()])
        norm = float(grads.norm())
        for weight in self.weights.values():
            weight.grad *= min(1.0, CLIP / (norm + 1e-6))
        return norm, int((grads == 0).sum())

    def train(self, steps):
        seen = []
        for step in steps:
            loss = self.gradients(step)
            norm, zeros = self.clip()
            self.adam.step()
            for name, param in self.net.named_parameters():
                param.data.copy_(self.weights[name])
            seen.append((loss, norm, zeros))
        return seen


def about(steps):
    """The tolerance is CLOSE's, and for its reason."""
    return [(pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-5), zeros) for loss, norm, zeros in steps]


def assert_same(actual, right, **tolerance):
    actual, right = ({name.removeprefix("module."): v for name, v in which.items()} for which in (actual, right))
    assert actual.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(actual[name], value.float().flatten(), **tolerance)


# The order in which gradients are summed and norms are taken differs: the last bits of fp32.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
