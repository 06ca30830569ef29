"""What the figures mean: one finding, one judge, used by patterns and predictions alike."""
