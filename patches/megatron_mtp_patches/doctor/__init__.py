"""Readers of the flags, launch scripts and configurations of a run, and the known defects that `doctor` finds in it.

exports.py reads a model that such a run has exported, for `check-export`.
"""
