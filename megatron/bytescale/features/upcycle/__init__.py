"""Experts from dense checkpoints: flags and changes to the training."""
