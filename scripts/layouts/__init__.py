"""Upstream's pretrain_gpt.py in each parallel layout. `python -m scripts.layouts --help`."""
