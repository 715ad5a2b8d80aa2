"""torch.cuda has one imaginary device for each local rank, streams and events; an error names what needs a real one."""

import os
import time

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


def test_streams_run_in_program_order():
    outer, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is outer
    side.wait_stream(outer)
    outer.wait_event(side.record_event())
    torch.ones(1).record_stream(side)


def test_events_measure_milliseconds_of_wall_clock_time():
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    before = time.perf_counter()
    start.record()
    between = time.perf_counter()
    time.sleep(0.01)
    later = time.perf_counter()
    end.record()
    after = time.perf_counter()
    assert 1e3 * (later - between) <= start.elapsed_time(end) <= 1e3 * (after - before)
