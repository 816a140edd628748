"""The order of work on pipeline stages, and the slices of micro-batches."""
