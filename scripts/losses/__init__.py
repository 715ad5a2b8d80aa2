"""The losses of MTP heads against float64 autograd on full logits: `python -m scripts.losses`."""
