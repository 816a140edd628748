"""Mirrors ``megatron.training``: parts that features install around the training loop."""
