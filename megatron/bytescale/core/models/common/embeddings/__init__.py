"""Rotary embeddings by position in the document."""
