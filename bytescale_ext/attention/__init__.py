"""Attention over the rows of a micro-batch: local documents and rings of any width."""
