"""Activation policies and memory plans: flags and changes to the training."""
