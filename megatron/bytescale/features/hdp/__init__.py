"""Hybrid data parallelism: its flags, and what it adds to the training."""
