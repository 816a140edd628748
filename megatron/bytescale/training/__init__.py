"""Mirrors ``megatron.training``: what each feature installs and runs around the training loop."""
