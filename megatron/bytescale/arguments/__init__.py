"""Parse our flags, check them against Megatron's, and resolve them."""
