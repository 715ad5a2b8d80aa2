"""What declarations of patches share: settings, edits that several patches need, and what is said of them."""
