"""Judge plans: replays, lower bounds, true optima, and other schedulers to compare with."""
