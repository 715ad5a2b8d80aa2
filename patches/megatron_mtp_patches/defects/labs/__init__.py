"""Code that the programs of several defects share."""
