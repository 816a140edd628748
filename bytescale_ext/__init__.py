"""ByteScale without Megatron: plans (pure), data, attention and communication (torch)."""
