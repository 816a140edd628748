"""Mirrors ``megatron.core.models.common``."""
