"""What is the same on every rung: flags, the profiling harness, reading a trace, reporting."""
