"""What is the same on every rung: flags, the profiling harness, reading a trace, reporting."""

import tracereader.interrupts  # noqa: F401  first: it answers Ctrl-C while the rest is imported
