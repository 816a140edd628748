"""Pipeline schedules over planned micro-batches and slices, and their communication."""
