"""Code that the scripts share."""
