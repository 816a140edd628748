"""Which rank computes which tokens of which expert: replicas in slots, by measured loads."""
