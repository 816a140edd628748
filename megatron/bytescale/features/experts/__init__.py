"""Replicas of experts that follow their load: their flags, and what they add to the training."""
