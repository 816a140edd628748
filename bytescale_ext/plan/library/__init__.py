"""The planner as a library for other frameworks, and their own calls that balance a batch. Numpy only."""
