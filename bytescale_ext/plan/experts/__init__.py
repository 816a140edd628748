"""Placement of experts: replicas in the slots of ranks, planned from measured loads."""
