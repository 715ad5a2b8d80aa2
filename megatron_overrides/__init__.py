"""The new behaviour, in a folder for each topic. What wraps a function of Megatron names it first in its docstring."""
