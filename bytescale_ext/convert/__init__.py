"""Conversion between the checkpoints of Hugging Face and Megatron: names and layouts of tensors."""
