"""Dense checkpoints that become experts: flags, and what they add to the training."""
