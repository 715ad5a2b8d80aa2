"""The same seeded work on every release. `python -m scripts.compare_releases --help`."""
