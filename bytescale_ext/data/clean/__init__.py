"""Cleaning of a corpus on datatrove: filters, masking of personal data, deduplication, and a report."""
