"""``bytescale generate``: options and output."""
