"""Draft heads: flags and changes to the training."""
