"""Plans of activations: which shares to keep, swap and recompute, and what that costs."""
