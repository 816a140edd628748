"""Tests of mixtures."""
