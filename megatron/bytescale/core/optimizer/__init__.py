"""Checkpoints of optimizer states that Megatron's optimizer cannot save by itself."""
