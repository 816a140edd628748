"""``bytescale generate``: its options and what it prints."""
