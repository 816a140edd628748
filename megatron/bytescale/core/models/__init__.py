"""Mirrors ``megatron.core.models``."""
