"""Layer specs with our attention, and the loss computed in chunks."""
