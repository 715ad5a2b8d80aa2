"""The cost of the patches: time, bytes and collectives. `python -m scripts.bench --help`."""
