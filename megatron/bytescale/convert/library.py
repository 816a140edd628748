"""Imports packages of Hugging Face, which are optional."""

from __future__ import annotations

import importlib
from types import ModuleType


def library(name: str) -> ModuleType:
    """Import a package. Raises ValueError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ValueError(f"{name} is not installed: pip install 'bytescale-megatron[tokenizers]'") from None
