"""All that is printed or drawn of a trace; Perfetto's hand-over."""
