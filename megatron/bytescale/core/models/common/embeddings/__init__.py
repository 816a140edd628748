"""Rotary embeddings by position in the document, and embedding tables in host memory."""
