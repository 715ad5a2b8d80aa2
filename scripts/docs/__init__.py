"""What scripts/docs.py is made of."""
