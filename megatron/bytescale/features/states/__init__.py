"""Model states in pages of host memory: flags and choice."""
