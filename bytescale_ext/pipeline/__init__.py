"""Pipelines whose micro-batches are cut into slices (Seq1F1B)."""
