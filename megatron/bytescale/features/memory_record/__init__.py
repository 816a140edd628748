"""The record of a step's memory: flags and changes to the training."""
