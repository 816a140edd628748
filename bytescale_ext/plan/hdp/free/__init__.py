"""The planner without aligned slots: each rank runs any number of micro-batches."""
