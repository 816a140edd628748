"""Attention over documents, norms, and layers with activation policies."""
