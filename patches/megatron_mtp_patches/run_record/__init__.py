"""A run's record of its patches: all ranks have the same ones, and differences from a resumed run are named."""
