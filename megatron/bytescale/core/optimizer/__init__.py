"""Optimizer states in pages of host memory, and their checkpoints where Megatron's optimizer cannot save them."""
