"""Pipelines in slices (Seq1F1B) and zero bubble: their flags, and what they add to the training."""
