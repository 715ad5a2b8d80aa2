"""What `parity` finds of the known wrong numbers and of mutants. `python -m scripts.parity_scores --help`."""
