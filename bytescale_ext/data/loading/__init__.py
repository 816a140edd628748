"""Loading: steps are planned ahead of training, and each rank reads its tokens of each step."""
