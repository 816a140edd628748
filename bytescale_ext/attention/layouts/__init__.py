"""Which rows attend to which keys, as frozen values: rows, blocks, micro-batches and slices."""
