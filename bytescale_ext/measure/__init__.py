"""Measurements: training metrics, timelines, memory peaks, speeds, and cost files fitted to measured times."""
