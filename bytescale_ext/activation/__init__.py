"""Activations of a layer: kept, swapped or recomputed, and the memory that they use."""
