"""Model states outside the device: Adam's states in pages, hosted gradients and parameters, rows of hash tables."""
