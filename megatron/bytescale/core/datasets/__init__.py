"""Data sets for Megatron's blended builder."""
