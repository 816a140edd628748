"""Layer specs with our attention, the loss computed in chunks, and draft heads on a trained model."""
