"""Streams run in program order, and events measure wall-clock time."""

import time

import pytest
import torch

pytestmark = pytest.mark.forked("torch")


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
