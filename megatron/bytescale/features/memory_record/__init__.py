"""The record of a step's memory: its flags, and what it adds to the training."""
