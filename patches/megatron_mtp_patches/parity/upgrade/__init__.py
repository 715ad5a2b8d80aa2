"""What another Megatron changes for a run."""
