"""Batches and losses: packed sequences, context parallelism and fine-tuning."""
