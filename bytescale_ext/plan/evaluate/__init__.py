"""Evaluation of plans: replays, lower bounds, optima, other schedulers for comparison, and slices chosen by time."""
