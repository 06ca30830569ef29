"""A Summary: everything measured of one trace, computed once."""

from tracereader.figures.summary import Summary, summarize

__all__ = ["Summary", "summarize"]
