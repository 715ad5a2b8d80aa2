"""A program for each defect that a CPU can show."""
