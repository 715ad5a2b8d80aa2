"""What a watch catches of known defects and of planted faults. `python -m scripts.watch_scores --help`."""
