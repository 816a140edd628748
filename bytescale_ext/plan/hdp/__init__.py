"""Planners of hybrid data parallelism: which ranks compute which tokens in which micro-batch."""
