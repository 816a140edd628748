"""Attention kernels behind one contract: the table with its probe, and each implementation."""
