"""The known defects of Megatron, by what they are about. A new one is one `Defect` in the module of its topic."""
