"""Reads any trace of PyTorch's profiler, without torch."""

__version__ = "0.2.0"
