"""The patches first, then Megatron, from several threads; then what other processes and torch.compile see of it.

The package is imported below the guard: a process that is spawned imports this file, and gets no patches by that.
"""

from __future__ import annotations

import json

if __name__ == "__main__":
    import importing_threads

    found = {"importing_threads": importing_threads.look()}
    import compiled
    import other_processes

    found |= {family.__name__: family.look() for family in (other_processes, compiled)}
    print(json.dumps(found))
