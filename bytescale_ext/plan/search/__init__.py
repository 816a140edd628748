"""Search the launch line of a model on a cluster: what its flags are, what each choice takes, and which is fastest."""
