"""torch.cuda manages one imaginary device for each local rank; what needs a real one raises an error that names it."""

import os

import pytest
import torch

pytestmark = pytest.mark.forked("torch")


def test_there_is_one_imaginary_device():
    assert torch.cuda.is_available() and torch.cuda.is_initialized()
    assert torch.cuda.device_count() == 1
    torch.cuda.set_device("cuda:0")
    torch.cuda.set_device(torch.device("cuda", 0))
    assert torch.cuda.current_device() == 0 and type(torch.cuda.current_device()) is int
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties(0).total_memory == torch.cuda.mem_get_info()[1]
    with torch.cuda.device(0):
        torch.cuda.synchronize()


def test_the_real_gpu_is_hidden():
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() is None


def test_memory_figures_are_zero():
    assert torch.cuda.memory_allocated() == torch.cuda.memory.max_memory_reserved() == 0
    assert torch.cuda.memory_stats()["allocated_bytes.all.peak"] == 0


@pytest.mark.parametrize("name", ["CUDAGraph", "graph", "MemPool", "use_mem_pool", "graph_pool_handle"])
def test_an_error_names_what_needs_a_gpu(name):
    with pytest.raises(NotImplementedError, match=rf"torch\.cuda\.{name}.*rehearsal"):
        getattr(torch.cuda, name)()


def test_an_error_names_memory_recording():
    with pytest.raises(NotImplementedError, match="_record_memory_history"):
        torch.cuda.memory._record_memory_history()
