"""Parses our flags, checks them against Megatron's flags, and resolves them."""
