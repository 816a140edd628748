"""Megatron's buffers of gradients and parameters in host memory."""
