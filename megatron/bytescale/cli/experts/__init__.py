"""``bytescale experts``: replays of recorded expert loads with each placement."""
