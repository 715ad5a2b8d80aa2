"""What a run says of its patches: that all ranks have the same, which, and how they differ from a resumed run's."""
