"""The same seeded work on every release. `python -m scripts.parity --help`."""
