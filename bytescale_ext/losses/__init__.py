"""Losses of whole documents, and the weights with which a second pass computes their gradients."""
