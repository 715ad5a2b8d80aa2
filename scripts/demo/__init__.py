"""From a fresh clone to two plots: scripts/demo.sh runs dataset.py and experiments.py, which runs train.py."""
