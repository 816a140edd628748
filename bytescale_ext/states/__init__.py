"""Model states outside the device: Adam's states in pages of host memory."""
