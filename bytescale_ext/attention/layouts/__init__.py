"""Attention layouts as frozen values, which map query rows to key rows: rows, blocks, micro-batches and slices."""
