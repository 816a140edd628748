"""Mixtures of data sets: weights from properties of each source, and from small training runs."""
