"""The order of work on pipeline stages, and where micro-batches are cut into slices."""
