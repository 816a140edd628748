"""Planners of hybrid data parallelism: they assign the tokens of a step to ranks and micro-batches."""
