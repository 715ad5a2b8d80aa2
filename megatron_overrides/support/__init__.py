"""What the overrides share. Megatron has no counterpart of these modules; all others stand at a path of its own."""
