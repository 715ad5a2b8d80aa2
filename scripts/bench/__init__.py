"""What the patches cost: time, bytes and collectives. `python -m scripts.bench --help`."""
