"""Reads PNG files."""

from __future__ import annotations
