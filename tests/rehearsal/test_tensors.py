"""Tensors "on cuda" are on the CPU, and report what they would report on a GPU."""

import pytest
import torch
from megatron_mtp_patches import rehearsal

pytestmark = pytest.mark.forked("torch")

SPELLINGS = ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0), 0]


@pytest.mark.parametrize("device", SPELLINGS, ids=str)
def test_factories_make_cpu_tensors(device):
    tensors = [
        torch.tensor([1.0], device=device),
        torch.as_tensor([1.0], device=device),
        torch.empty(2, device=device, pin_memory=False),
        torch.arange(3, device=device),
        torch.zeros_like(torch.ones(2), device=device),
        torch.randint(0, 3, (2,), device=device),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.ones(1).to(device=device, dtype=torch.bfloat16),
    ]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_factories_below_the_python_functions_make_cpu_tensors():
    cuda = torch.device("cuda", 0)
    assert torch.ops.aten.zeros.default([2], device=cuda).device.type == "cpu"
    assert torch.ops.aten.empty_strided.default([2], [1], device=cuda).device.type == "cpu"
    assert torch.ones(1).new_zeros(2, device=cuda).device.type == "cpu"


def test_moving_to_the_gpu_is_the_identity():
    tensor = torch.ones(3)
    assert all(moved is tensor for moved in (tensor.cuda(), tensor.to("cuda"), tensor.to(0), tensor.pin_memory()))


def test_meta_tensors_stay_meta_tensors():
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert not torch.empty(2, device="meta").is_cuda


def test_tensors_report_a_gpu():
    tensor = torch.ones(2, dtype=torch.bfloat16)
    assert tensor.is_cuda
    assert tensor.type() == "torch.cuda.BFloat16Tensor"
    assert tensor.type("torch.cuda.FloatTensor").dtype == torch.float32
    assert tensor.type(torch.float64).dtype == torch.float64
    assert torch.nn.Linear(2, 2).cuda().weight.is_cuda
    with torch.device("cuda"):  # a mode, which calls the methods of Tensor by their names
        assert tensor.type() == torch.ones(2).bfloat16().type() == "torch.cuda.BFloat16Tensor"


def test_a_checkpoint_from_a_gpu_loads_on_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:1")
    torch.save({"weight": torch.arange(3)}, tmp_path / "gpu.pt")
    assert torch.load(tmp_path / "gpu.pt")["weight"].tolist() == [0, 1, 2]


def test_a_second_install_changes_nothing():
    before = torch.Tensor.to, torch.zeros, torch.distributed.all_gather
    rehearsal.install()
    assert rehearsal.installed()
    assert (torch.Tensor.to, torch.zeros, torch.distributed.all_gather) == before
