"""The address of each allocation of a step, decided before training."""
