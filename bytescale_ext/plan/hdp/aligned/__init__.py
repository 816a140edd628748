"""Planners whose ranks run equally many slots, aligned for pipelines."""
