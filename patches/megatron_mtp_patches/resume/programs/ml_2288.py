"""An asynchronous save by a process of its own: whether the memory that holds the state on the host is still held while
that process writes.
"""

import torch

from ...defects.labs.lab import start


def reproduce():
    import multiprocessing

    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, TemporalAsyncCaller
    from torch.multiprocessing.reductions import StorageWeakRef

    start()
    can_end = multiprocessing.get_context("fork").Event()
    memory = []

    def stage():
        state = torch.ones(8, device="cpu")
        memory.append(StorageWeakRef(state.untyped_storage()))
        return state

    def write(path, state):
        can_end.wait()

    caller = TemporalAsyncCaller()
    caller.schedule_async_call(AsyncRequest(write, ("path", None), [], preload_fn=stage))
    is_held = not memory[0].expired()
    can_end.set()
    caller.process.join()
    return "held", "held" if is_held else "free"
