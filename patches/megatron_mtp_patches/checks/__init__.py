"""Which known defects affect a run: readers of flags, launch scripts and configurations, and the diagnosis."""
