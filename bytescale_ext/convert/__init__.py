"""Hugging Face checkpoints and Megatron's: which flags a model has, and which tensors are which."""
