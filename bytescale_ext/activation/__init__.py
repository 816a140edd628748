"""Keep, swap or recompute the activations of a layer, and the memory that they take."""
