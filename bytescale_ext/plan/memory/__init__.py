"""Where each allocation of a step lies in memory, decided before training."""
