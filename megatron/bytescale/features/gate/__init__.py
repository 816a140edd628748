"""Gates that start dense: their flags, and what they add to the training."""
