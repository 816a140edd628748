"""Mixtures of data sets: weights from what is known of each source, and from small training runs."""
