"""Gates that start dense: flags and changes to the training."""
