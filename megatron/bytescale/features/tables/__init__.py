"""N-gram tables, and the vocabulary embedding in host memory: flags, and their part in the training."""
