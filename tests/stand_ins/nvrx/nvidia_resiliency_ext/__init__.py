"""Stands for nvidia-resiliency-ext >= 0.6, which is not on PyPI, for Megatron-Bridge: it imports one of its names."""

__version__ = "0.0.0"
