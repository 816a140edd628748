"""Lengths and texts of documents, epochs, and the packed micro-batches made of them."""
