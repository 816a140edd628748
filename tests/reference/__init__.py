"""An independent model in plain PyTorch, and real trainings that are compared with it."""
