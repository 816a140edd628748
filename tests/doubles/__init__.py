"""Packages that need a GPU, played in plain PyTorch with their public signatures."""

from __future__ import annotations

import importlib
import sys


def install_deep_ep() -> None:
    """Make ``deep_ep`` importable in this process, and bind Megatron's flex dispatcher to it."""
    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    from tests.doubles import deep_ep

    sys.modules |= {"deep_ep": deep_ep, "deep_ep.utils": deep_ep}
    importlib.reload(fused_a2a)
    for name in "fused_dispatch fused_combine set_deepep_num_sms hybrid_ep_dispatch hybrid_ep_combine".split():
        setattr(token_dispatcher, name, getattr(fused_a2a, name))
