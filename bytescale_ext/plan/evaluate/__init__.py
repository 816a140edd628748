"""Judge plans: replays, lower bounds, true optima, other schedulers to compare with, and slices chosen by time."""
