"""Reader of PNG files."""

from __future__ import annotations
