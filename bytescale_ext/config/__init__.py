"""Frozen configuration of each feature."""
