"""The planner of aligned slots: a ring has the same slot on all its ranks."""
