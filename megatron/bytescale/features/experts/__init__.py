"""Replicas of experts that follow their load: flags and changes to the training."""
