"""Hybrid data parallelism: flags and changes to the training."""
