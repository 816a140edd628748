"""Checkpoints of Hugging Face models made into Megatron's, and back."""
