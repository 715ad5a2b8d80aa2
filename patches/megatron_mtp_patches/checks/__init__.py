"""The known defects that affect a run: readers of flags, launch scripts and configurations, and the diagnosis."""
