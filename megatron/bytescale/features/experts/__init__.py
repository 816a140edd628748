"""Features of experts: the record of their loads, replicas that follow them, and gates that start dense."""
