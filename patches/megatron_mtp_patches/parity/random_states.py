"""The states of the random generators that a checkpoint of Megatron keeps, but for torch's own of the CPU.

From that one each start of a data loader draws a number.
"""

from __future__ import annotations

import pickle
import random
import zlib
from typing import Any

import numpy


def digest_random_states() -> dict[str, int]:
    """A number for the state of each generator of this rank; equal states have equal ones."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states: dict[str, Any] = {
        "Python": random.getstate(),
        "numpy": numpy.random.get_state(),
        **{f"Megatron's {name}": state.tolist() for name, state in get_cuda_rng_tracker().get_states().items()},
    }
    return {name: zlib.crc32(pickle.dumps(state)) for name, state in states.items()}
