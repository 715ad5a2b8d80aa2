"""`parity` on drawn configurations: `python -m scripts.fuzz --script CHECKOUT/pretrain_gpt.py --seed 0 --count 20`."""
