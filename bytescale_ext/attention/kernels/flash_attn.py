"""The flash-attn packages as attention kernels, if they are installed. ``contract.py`` has the shapes and dtypes.

====================================  ==============  ==========================
module                                package         generations
====================================  ==============  ==========================
``flash_attn.flash_attn_interface``   flash-attn 2    Ampere and later
``flash_attn_interface``              flash-attn 3    Ampere and Hopper
``flash_attn.cute.interface``         flash-attn 4    Hopper and Blackwell
====================================  ==============  ==========================

Only their low-level functions return and take the log-sum-exp. Parameters and their order differ between versions, so
arguments are passed by name, if the installed function has the name. The calls were written for the versions in
``tests/attention/kernels/signatures.toml``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch

from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved
from bytescale_ext.attention.layouts.blocks import AttentionBlock

FEW_QUERIES: Final = 64
"""A package may divide the keys among multiprocessors if a document has at most this number of queries."""


@dataclass(frozen=True, slots=True)
class FlashAttn:
    """A flash-attn package.

    Attributes:
        package: name of the package.
        module: module with the two functions.
        forward_name: name of the function that returns ``out`` and the log-sum-exp.
        backward_name: name of the function that writes ``dq, dk, dv``.
        no_window: size of a window that means no limit.
        num_splits: number of parts of the keys of few queries that are computed side by side; 0: the package decides.
    """

    package: str
    module: str
    forward_name: str
    backward_name: str
    no_window: int | None = -1
    num_splits: int = 1

    def missing(self) -> str | None:
        """Return why the package cannot be used, or None. Does not import the package."""
        top, *below = self.module.split(".")
        spec = importlib.util.find_spec(top)
        folders = () if spec is None else spec.submodule_search_locations or ()
        is_here = any(Path(folder, *below).with_suffix(".py").is_file() for folder in folders) if below else spec
        return None if is_here else f"the package {self.package} is not installed"

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        """Return ``out [tq, heads, dim]`` and ``lse [heads, tq]``."""
        function = getattr(importlib.import_module(self.module), self.forward_name)
        values = {"q": q, "k": k, "v": v, "return_lse": True, **self._common(block, q.device)}
        has_few = not block.causal and block.cu_q.longest <= FEW_QUERIES
        values["num_splits"] = self.num_splits if has_few else 1
        results = call_by_name(function, values)
        # flash-attn 2 before 2.7 also returns the padded inputs: out, q, k, v, out_padded, lse, ...
        out, lse = (results[0], results[5]) if len(results) == 8 else (results[0], results[1])
        return out, lse

    def backward(self, dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
        """Return ``dq [tq, heads, dim]`` and ``dk, dv [tk, kv_heads, dim]``."""
        q, k, v, out, lse = saved
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        values: dict[str, object] = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "dq": dq, "dk": dk, "dv": dv}
        values["lse"] = values["softmax_lse"] = lse.contiguous()
        values |= self._common(block, q.device)
        values["deterministic"] = torch.are_deterministic_algorithms_enabled()  # --deterministic-mode sets it
        call_by_name(getattr(importlib.import_module(self.module), self.backward_name), values)
        return dq, dk, dv

    def _common(self, block: AttentionBlock, device: torch.device) -> dict[str, object]:
        """Return the common arguments of forward and backward, under every name that a version has used."""
        window = (self.no_window, self.no_window) if block.window is None else (block.window, 0)
        return {
            "cu_seqlens_q": block.cu_q.on(device),
            "cu_seqlens_k": block.cu_k.on(device),
            "max_seqlen_q": block.cu_q.longest,
            "max_seqlen_k": block.cu_k.longest,
            "softmax_scale": block.scale,
            "causal": block.causal,
            "is_causal": block.causal,
            "dropout_p": 0.0,
            "window_size": window,
            "window_size_left": window[0],
            "window_size_right": window[1],
            "softcap": 0.0,
            "return_softmax": False,
        }


FLASH_ATTN_2 = FlashAttn(
    "flash_attn", "flash_attn.flash_attn_interface", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward"
)
FLASH_ATTN_3 = FlashAttn(
    "flash_attn_interface", "flash_attn_interface", "_flash_attn_forward", "_flash_attn_backward", num_splits=0
)
FLASH_ATTN_4 = FlashAttn(
    "flash_attn.cute", "flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd", no_window=None
)


def call_by_name[Result](function: Callable[..., Result], values: dict[str, object]) -> Result:
    """Call a function with those ``values`` that it has parameters for. Other required parameters get None."""
    arguments = {}
    for name, has_default in _parameters(function):
        if name in values:
            arguments[name] = values[name]
        elif not has_default:
            arguments[name] = None
    return function(**arguments)


# Every layer calls the same function several times per step, and reading a signature takes longer than a launch.
@lru_cache(maxsize=16)
def _parameters(function: Callable[..., object]) -> list[tuple[str, bool]]:
    """Return the name of each parameter and whether it has a default, of a Python function or torch operator."""
    operator = getattr(function, "_opoverload", None)
    if operator is not None:
        return [(argument.name, argument.has_default_value()) for argument in operator._schema.arguments]
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.default is not parameter.empty) for parameter in parameters]
