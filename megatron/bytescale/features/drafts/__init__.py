"""Draft heads: their flags, and what they add to the training."""
