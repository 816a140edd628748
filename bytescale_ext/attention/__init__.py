"""Causal attention of packed documents over rings of ranks and slices of micro-batches."""
