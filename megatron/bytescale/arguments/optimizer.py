"""Bytes of the states of the optimizer that Megatron builds for its arguments."""

from __future__ import annotations

import importlib.util
from typing import Any

from bytescale_ext.plan.memory.model_states import GRADIENT_BYTES, MAIN_PARAMETER_BYTES, MOMENT_BYTES, StateSizes

MOMENT = MOMENT_BYTES // 2
"""Bytes of one moment of a parameter, in float32."""

MATRIX_BYTES = 12
"""Bytes of a number of the matrix that Muon updates: the orthogonal matrix in float32, and two scaled copies of it."""

REMAINDER_BYTES = 2
"""Bytes of the rest of a float32 parameter whose other half is the bfloat16 parameter itself (TransformerEngine)."""


def state_sizes_of(args: Any, on_cuda: bool) -> StateSizes:
    """Return the bytes of a parameter's states under Megatron 0.19.2's optimizer, on GPUs or on CPU."""
    element = args.params_dtype.itemsize
    gradient = GRADIENT_BYTES if args.accumulate_allreduce_grads_in_fp32 else element
    is_precise = args.use_precision_aware_optimizer
    moments, of_ends = _moments(args)
    copied = GRADIENT_BYTES if gradient < GRADIENT_BYTES and not is_precise else 0
    is_torch, is_muon = on_cuda and not has_fused_optimizers(args), "muon" in args.optimizer
    return StateSizes(
        gradient=gradient,
        main=_main(args) if is_precise else MAIN_PARAMETER_BYTES,
        moments=moments,
        end_moments=of_ends,
        update=copied + (_temporary(args) if is_torch else 0),
        end_update=MOMENT if is_torch and is_muon and args.muon_scalar_optimizer == "adam" else 0,
        matrix_update=MATRIX_BYTES + (MOMENT if args.muon_nesterov else 0) if is_muon else 0,
    )


def has_fused_optimizers(args: Any) -> bool:
    """Return whether Megatron takes Adam and SGD from TransformerEngine or Apex, not from torch."""
    packages = ("transformer_engine", "apex")
    is_installed = any(importlib.util.find_spec(package) is not None for package in packages)
    return is_installed or args.transformer_impl == "transformer_engine"


def _moments(args: Any) -> tuple[int, int | None]:
    """Return the bytes of the moments of a parameter, and of a parameter of an embedding if they differ."""
    if args.optimizer == "adam":
        precise = args.use_precision_aware_optimizer
        each = (args.exp_avg_dtype.itemsize, args.exp_avg_sq_dtype.itemsize) if precise else (MOMENT, MOMENT)
        return sum(each), None
    if args.optimizer == "sgd":
        return (MOMENT if args.sgd_momentum else 0), None
    if args.optimizer == "lion":
        return MOMENT, None
    return MOMENT, MOMENT if args.muon_scalar_optimizer == "lion" else MOMENT_BYTES


def _main(args: Any) -> int:
    """Return the bytes of a main parameter of the precision-aware optimizer."""
    size = int(args.main_params_dtype.itemsize)
    return REMAINDER_BYTES if args.bf16 and size == MAIN_PARAMETER_BYTES and not args.fp8 else size


def _temporary(args: Any) -> int:
    """Return the bytes of a parameter that torch's own optimizers need at a time for all parameters together.

    Adam stores the roots of all second moments, and SGD all gradients with their weight decay. Muon and Lion update
    one parameter after the other.
    """
    if args.optimizer == "adam":
        return MOMENT
    return GRADIENT_BYTES if args.optimizer == "sgd" and args.weight_decay else 0
