"""Metrics and timelines of training, and cost models fitted to measured times."""
