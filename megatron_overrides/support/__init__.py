"""What the overrides share. All other modules stand at the path of the Megatron module that they change."""
