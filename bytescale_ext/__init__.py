"""Plans (pure), data, attention, activations and communication; nothing here imports Megatron."""
