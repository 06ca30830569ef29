"""Reads any trace of PyTorch's profiler, without torch."""

__version__ = "1.0.0"
__all__ = ["Run", "TraceError", "__version__", "compare", "read", "read_ranks"]


def __getattr__(name: str):
    """Return a public name. The command imports this package, too, and needs none of them."""
    if name in __all__:
        from tracereader import api

        return getattr(api, name)
    raise AttributeError(f"module 'tracereader' has no attribute {name!r}")
