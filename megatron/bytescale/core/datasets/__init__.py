"""Data sets for Megatron's own blended builder."""
