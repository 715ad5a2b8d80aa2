"""The new behaviour, in a folder for each topic; a wrappers.py has what is called in place of Megatron's functions."""
