"""The plan of one step: its values, its table, its printed form and its independent check."""
