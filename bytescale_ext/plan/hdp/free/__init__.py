"""Planners whose ranks run any number of micro-batches, without a pipeline."""
