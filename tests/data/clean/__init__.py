"""Cleaning: each step by itself, then the stages together."""
