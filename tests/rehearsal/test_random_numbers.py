"""The GPU's random numbers and the CPU's are two streams."""

import pytest
import torch

pytestmark = pytest.mark.forked("torch")


def test_drawing_on_the_gpu_does_not_change_the_cpu_stream():
    torch.manual_seed(1)
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    assert torch.equal(torch.get_rng_state(), cpu)
    assert not torch.equal(torch.cuda.get_rng_state(), gpu)
    torch.cuda.set_rng_state(gpu)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_torch_seeds_both_streams_and_cuda_seeds_only_its_own():
    torch.manual_seed(5)
    assert torch.initial_seed() == torch.cuda.initial_seed() == 5
    torch.cuda.manual_seed(6)
    assert (torch.initial_seed(), torch.cuda.initial_seed()) == (5, 6)
    assert torch.cuda.default_generators[torch.cuda.current_device()].initial_seed() == 6
    assert torch.rand(1, generator=torch.Generator(device="cuda").manual_seed(1)).device.type == "cpu"


def test_the_data_loader_draws_on_the_cpu():
    torch.manual_seed(1)
    cpu, gpu = torch.get_rng_state(), torch.cuda.get_rng_state()
    loader = torch.utils.data.DataLoader([1, 2], pin_memory=True)
    assert [int(batch) for batch in loader] == [1, 2]
    assert torch.equal(torch.cuda.get_rng_state(), gpu)
    assert not torch.equal(torch.get_rng_state(), cpu)
