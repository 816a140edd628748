"""Plan steps ahead of training and load this rank's tokens of each step."""
