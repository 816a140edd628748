"""Model states in pages of host memory: their flags and their choice."""
