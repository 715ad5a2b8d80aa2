"""Common parts of declarations: settings, edits that several patches need, and their descriptions."""
