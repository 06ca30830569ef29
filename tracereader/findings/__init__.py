"""What the figures mean. Each finding has one judge, which patterns and predictions share."""
