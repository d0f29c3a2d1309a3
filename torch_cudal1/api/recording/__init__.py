"""The calls that production makes, noted with their shapes, and made again for a warm-up."""
