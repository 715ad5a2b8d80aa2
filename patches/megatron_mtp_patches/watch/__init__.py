"""The watch over a live run."""
