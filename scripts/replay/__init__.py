"""Upstream's unit tests without and with the patches. `python -m scripts.replay --help`."""
