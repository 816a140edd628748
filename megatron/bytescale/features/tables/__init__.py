"""Tables in host memory, of n-grams and of the vocabulary: their flags, and what they add to the training."""
