"""Train MTP heads by each loss, and count what a speculative decoder accepts: `python -m scripts.acceptance`."""
