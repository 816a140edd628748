"""FP8 tensors of TransformerEngine on ghost GPUs, with one scale for each tensor (the recipe "tensorwise").

As on compute capability 9, a product reads both factors along their common dimension: a factor that is stored across it
needs its transposed copy, and all sides are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.ghost.played import TORCH_TYPES, played

Tensor = torch.Tensor
ALIGNED = 16


def tensors() -> Any:
    """Return TransformerEngine's module of FP8 tensors, which imports the played functions."""
    from transformer_engine.pytorch.tensor import float8_tensor

    return float8_tensor


def scaled(tensor: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Return FP8 bytes of a tensor's shape, and the inverse of its scale [1].

    Communicates if the ranks of a group have parts of one tensor.
    """
    if not isinstance(quantizer, tensors().Float8CurrentScalingQuantizer):
        raise NotImplementedError(f"{type(quantizer).__name__} is not played")
    largest = tensor.float().abs().amax() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32)
    if quantizer.with_amax_reduction:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    kind = TORCH_TYPES[int(quantizer.dtype)]
    limit = torch.finfo(kind).max
    scale = torch.where(largest > 0, limit / largest.clamp_min(quantizer.amax_epsilon), 1.0)
    if quantizer.force_pow_2_scales:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    data = (tensor.float() * scale).clamp(-limit, limit).to(kind).view(torch.uint8)
    return data, scale.reciprocal()[None]


def transposed(data: Tensor) -> Tensor:
    """Return bytes [width, ...] of bytes [..., width]."""
    return data.movedim(-1, 0).contiguous()


@played
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Return a tensor in FP8, or write to ``output``. ``noop``: [1], not 0 if nothing is to be done."""
    if noop is not None and float(noop):
        return output
    data, inverse = scaled(tensor, quantizer)
    columns = transposed(data) if quantizer.columnwise_usage else None
    if output is not None:
        for place, value in ((output._data, data), (output._transpose, columns), (output._scale_inv, inverse)):
            if place is not None and value is not None:
                place.copy_(value.view(place.shape))
        output._transpose_invalid = columns is None
        return output
    rows = data if quantizer.rowwise_usage else None
    return made(quantizer, rows, columns, inverse, tensor.shape, tensor.dtype)


def made(
    quantizer: Any, data: Tensor | None, columns: Tensor | None, inverse: Tensor, shape: torch.Size, dtype: torch.dtype
) -> Any:
    """Return a tensor in FP8 of a shape, which stands for a tensor of ``dtype``.

    ``data``, ``columns``: bytes of the shape, and their transposed copy; ``inverse``: inverse of the scale, [1].
    """
    kinds = tensors()
    given = {
        "data": data,
        "fp8_scale_inv": inverse,
        "fp8_dtype": quantizer.dtype,
        "data_transpose": columns,
        "quantizer": quantizer,
    }
    if quantizer.internal:
        return kinds.Float8TensorStorage(fake_dtype=dtype, **given)
    return kinds.Float8Tensor(shape=shape, dtype=dtype, device=inverse.device, **given)


@played
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """Return a tensor in FP8 without values."""
    data = torch.empty(list(shape), dtype=torch.uint8, device=device)
    columns = transposed(data) if quantizer.columnwise_usage else None
    rows = data if quantizer.rowwise_usage else None
    return made(quantizer, rows, columns, torch.ones(1, device=device), data.shape, dtype)


def values(data: Tensor, tensor: Any) -> Tensor:
    """Return the float32 values of FP8 bytes of a tensor."""
    return data.view(TORCH_TYPES[int(tensor._fp8_dtype)]).float() * tensor._scale_inv


@played
def dequantize(tensor: Any, otype: Any) -> Tensor:
    """Return the values of a tensor in FP8."""
    return values(tensor._data, tensor).to(TORCH_TYPES[int(otype)])


@played
def fp8_transpose(data: Tensor, otype: Any, out: Tensor | None = None) -> Tensor:
    """Return bytes [width, ...] of bytes [..., width]."""
    return transposed(data) if out is None else out.copy_(transposed(data))


@played
def bgrad_quantize(tensor: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the sum over all rows, and the tensor in FP8."""
    return tensor.reshape(-1, tensor.shape[-1]).float().sum(0).to(tensor.dtype), quantize(tensor, quantizer)


@played
def split_quantize(
    tensor: Tensor, split_sections: Sequence[int], quantizer_list: Sequence[Any], **_: object
) -> list[Any]:
    """Return the parts of a tensor in FP8, each with a scale of its own."""
    parts = tensor.split(list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


@played
def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copy the rows of each part to a longer part, whose further rows are 0."""
    parts = output.split(list(padded_input_row_list))
    for rows, place in zip(input.split(list(input_row_list)), parts, strict=True):
        place[: len(rows)].copy_(rows)
        place[len(rows) :].zero_()


@played
def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Copy the first rows of each part to a shorter part."""
    parts = output.split(list(unpadded_input_row_list))
    for rows, place in zip(input.split(list(input_row_list)), parts, strict=True):
        place.copy_(rows[: len(place)])


def nominal_type(tensor: Any) -> torch.dtype:
    """Return the type that a tensor in FP8 stands for, or the type of another tensor."""
    kind: torch.dtype = tensor._dtype if isinstance(tensor, tensors().Float8TensorStorage) else tensor.dtype
    return kind


def factors(one: Any, is_one_transposed: bool, other: Any, is_other_transposed: bool) -> tuple[Tensor, Tensor]:
    """Return two factors of a product, as ``product`` takes them, with the values of those in FP8."""
    first, second = factor(one, is_one_transposed), factor(other, not is_other_transposed)
    return first, second


def factor(tensor: Any, is_along: bool) -> Tensor:
    """Return a factor [..., width], which is stored along the common dimension of the product or across it.

    Raises RuntimeError for a factor in FP8 whose copy along that dimension is missing, or whose sides are not aligned.
    """
    if not isinstance(tensor, tensors().Float8TensorStorage):
        return tensor  # type: ignore[no-any-return]
    rows, columns = tensor._data, None if tensor._transpose_invalid else tensor._transpose
    along = rows if is_along else columns
    if along is None:
        raise RuntimeError(f"an FP8 product needs the {'rows' if is_along else 'transposed copy'} of a factor")
    flat = along.reshape(-1, along.shape[-1]) if is_along else along.reshape(along.shape[0], -1)
    if any(side % ALIGNED for side in flat.shape):
        raise RuntimeError(f"an FP8 product has sides that are not multiples of {ALIGNED}: {tuple(flat.shape)}")
    return values(along, tensor) if is_along else values(along, tensor).movedim(0, -1)


PLAYED = (
    quantize, dequantize, fp8_transpose, bgrad_quantize, split_quantize, create_empty_quantized_tensor,
    fused_multi_row_padding, fused_multi_row_unpadding,
)  # fmt: skip
"""The functions of ``transformer_engine_torch`` that are played here."""
