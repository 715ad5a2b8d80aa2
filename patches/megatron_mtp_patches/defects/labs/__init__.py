"""What the programs of several defects share."""
