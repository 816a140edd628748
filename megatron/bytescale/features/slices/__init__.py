"""Pipelines in slices (Seq1F1B) and zero bubble: flags and changes to the training."""
