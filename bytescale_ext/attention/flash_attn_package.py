"""The flash-attn packages as attention kernels, when they are installed. The contract is in ``kernels.py``.

``flash_attn_interface`` is flash-attn 3 (Hopper), ``flash_attn.flash_attn_interface`` is flash-attn 2. Only their
low-level functions give and take the log-sum-exp. Versions differ in parameters and in order, so arguments
are passed by the names that the installed function has.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import torch

from bytescale_ext.attention.rows import CuSeqlens

FLASH_ATTN_2 = "flash_attn.flash_attn_interface"
FLASH_ATTN_3 = "flash_attn_interface"


def missing_2() -> str | None:
    """Why flash-attn 2 cannot be used, or None."""
    return None if importlib.util.find_spec("flash_attn") else "the package flash_attn is not installed"


def missing_3() -> str | None:
    """Why flash-attn 3 cannot be used, or None."""
    found = importlib.util.find_spec("flash_attn_interface")
    return None if found else "the package flash_attn_interface (flash-attn 3) is not installed"


def forward_2(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """flash-attn 2."""
    return _forward(FLASH_ATTN_2, "_flash_attn_varlen_forward", *arguments)


def backward_2(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """flash-attn 2."""
    return _backward(FLASH_ATTN_2, "_flash_attn_varlen_backward", *arguments)


def forward_3(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """flash-attn 3."""
    return _forward(FLASH_ATTN_3, "_flash_attn_forward", *arguments)


def backward_3(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """flash-attn 3."""
    return _backward(FLASH_ATTN_3, "_flash_attn_backward", *arguments)


def _forward(
    module: str,
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    results = call_by_name(
        getattr(importlib.import_module(module), function),
        {"q": q, "k": k, "v": v, **_common(cu_q, cu_k, q.device, causal, scale)},
    )
    # flash-attn 2 before 2.7 gives the padded inputs too: out, q, k, v, out_padded, lse, ...
    out, lse = (results[0], results[5]) if len(results) == 8 else (results[0], results[1])
    return out, lse


def _backward(
    module: str,
    function: str,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    values: dict[str, Any] = {"dout": dout, "q": q, "k": k, "v": v, "out": out, "softmax_lse": lse.contiguous()}
    values |= {"dq": dq, "dk": dk, "dv": dv, "deterministic": False}
    values |= _common(cu_q, cu_k, q.device, causal, scale)
    call_by_name(getattr(importlib.import_module(module), function), values)
    return dq, dk, dv


def _common(cu_q: CuSeqlens, cu_k: CuSeqlens, device: torch.device, causal: bool, scale: float) -> dict[str, Any]:
    """Values of the parameters that forward and backward share, under every name they have had."""
    return {
        "cu_seqlens_q": cu_q.on(device),
        "cu_seqlens_k": cu_k.on(device),
        "max_seqlen_q": cu_q.longest,
        "max_seqlen_k": cu_k.longest,
        "softmax_scale": scale,
        "causal": causal,
        "is_causal": causal,
        "dropout_p": 0.0,
        "window_size": (-1, -1),
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "return_softmax": False,
    }


def call_by_name(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Call with those values whose names the function has; a parameter without value or default gets None."""
    arguments = {}
    for name, has_default in _parameters(function):
        if name in values:
            arguments[name] = values[name]
        elif not has_default:
            arguments[name] = None
    return function(**arguments)


def _parameters(function: Callable[..., Any]) -> list[tuple[str, bool]]:
    """``(name, has a default)`` of each parameter, of a Python function or of a torch custom operator."""
    operator = getattr(function, "_opoverload", None)
    if operator is not None:
        return [(argument.name, argument.has_default_value()) for argument in operator._schema.arguments]
    parameters = inspect.signature(function).parameters.values()
    return [(parameter.name, parameter.default is not parameter.empty) for parameter in parameters]
