"""Activation policies and memory plans: their flags, and what they add to the training."""
