"""What is the same on every rung: flags, the profiling harness, the lesson around a script; what some rungs need."""

import tracereader.interrupts  # noqa: F401  first: it answers Ctrl-C while the rest is imported
