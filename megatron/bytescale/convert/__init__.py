"""Conversion of checkpoints between Hugging Face and Megatron."""
