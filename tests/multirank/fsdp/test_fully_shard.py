"""An optimizer that `fully_shard_optimizer` gets trains as the same optimizer does in plain PyTorch."""

import pytest
import torch
import torch.distributed as dist
from megatron.core.distributed.fsdp.src import megatron_fsdp
from torch.distributed.device_mesh import init_device_mesh

from tests.trainings.fsdp import Block, batch_of, loss_of, make_net

pytestmark = [
    pytest.mark.forked("patched"),
    pytest.mark.guards("count-no-step-in-fully-shard-optimizer"),
    pytest.mark.ranks(2),
]

pytest.importorskip("einops", reason="Megatron-FSDP needs einops")

STEPS = 4
SETTINGS = {"lr": 0.01, "weight_decay": 0.1}
OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "a learning rate in a tensor": lambda params, lr, **rest: torch.optim.AdamW(
        params, torch.tensor(lr), foreach=False, **rest
    ),
}


def make(name, **settings):
    mesh = init_device_mesh("cuda", (dist.get_world_size(), 1), mesh_dim_names=("shard", "tp"))
    model = megatron_fsdp.fully_shard_model(
        make_net(torch.float32), mesh, dp_shard_dim="shard", tp_dim="tp", fsdp_unit_modules=[Block, torch.nn.Linear]
    )
    optimizer = OPTIMIZERS[name](model.parameters(), **(SETTINGS | settings))
    return model, megatron_fsdp.fully_shard_optimizer(optimizer)


def losses(model, optimizer):
    actual = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch_of(step, 0, torch.float32))
        loss.backward()
        optimizer.step()
        actual.append(float(loss))
    return actual


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_plain_pytorch(parallel, name):
    parallel()
    plain = make_net(torch.float32)
    expected = losses(plain, OPTIMIZERS[name](plain.parameters(), **SETTINGS))
    assert losses(*make(name)) == pytest.approx(expected, rel=1e-5)
