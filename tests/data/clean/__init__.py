"""Tests of cleaning: each step separately, then all stages together."""
