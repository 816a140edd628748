"""Search for the fastest launch line of a model on a cluster."""
