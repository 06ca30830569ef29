"""Everything that is printed or drawn of a trace, and the hand-over to Perfetto."""
