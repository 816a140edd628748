"""Mixtures of experts over documents: routing losses and the coupling of ranks."""
