"""Mirrors ``megatron.core``: each file changes or extends the file of the same path."""
