"""Figures of plans: timelines, schedules and activations."""
