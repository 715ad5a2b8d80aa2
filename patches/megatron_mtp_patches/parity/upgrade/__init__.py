"""`upgrade`: what another Megatron changes for a run.

Two Megatrons (trees.py) read the flags of a run, each in a process of its own (reading.py), and what they make of them
is compared (comparison.py), without the settings of features that the run does not use (features.py). With `--run` each
trains the run made small (small_run.py), and the numbers are compared (numbers.py).
"""
