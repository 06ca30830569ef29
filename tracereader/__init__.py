"""Reads any trace of PyTorch's profiler, without torch."""
