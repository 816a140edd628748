"""FP8 tensors of TransformerEngine on ghost GPUs: one scale for a tensor ("tensorwise"), or for 128 elements or a block
of 128 x 128 ("blockwise").

As on compute capability 9, a product reads both factors along their common dimension: a factor that is stored across it
needs its transposed copy, and all sides are multiples of 16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.ghost.played import TORCH_TYPES, played

Tensor = torch.Tensor
ALIGNED = 16  # rows and columns of a factor
BLOCK = 128  # elements that share a scale
PADDED = 4  # scales of a row are a multiple of it


def engine() -> Any:
    """Return TransformerEngine's package of tensors, which imports the played functions."""
    import transformer_engine.pytorch.tensor as package

    return package


def bytes_of(rows: Tensor, largest: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Return FP8 bytes of values, and the inverse of the scale for each value of ``largest``, which is broadcast."""
    kind = TORCH_TYPES[int(quantizer.dtype)]
    limit = torch.finfo(kind).max
    scale = torch.where(largest > 0, limit / largest.clamp_min(quantizer.amax_epsilon), 1.0)
    if quantizer.force_pow_2_scales:
        scale = torch.exp2(torch.floor(torch.log2(scale)))
    return (rows * scale).clamp(-limit, limit).to(kind).view(torch.uint8), scale.reciprocal()


def in_blocks(matrix: Tensor, quantizer: Any) -> tuple[Tensor, Tensor]:
    """Return FP8 bytes of a matrix [m, k], and the inverse scales of its blocks.

    They are [m / 128, k / 128] for blocks of 128 x 128, and [k / 128, m] for 128 elements of a row, rounded up.
    """
    rows, width = matrix.shape
    height = BLOCK if quantizer.block_scaling_dim == 2 else 1
    padded = F.pad(matrix.float(), (0, -width % BLOCK, 0, -rows % height))
    tiles = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))  # [tiles, height, tiles, 128]
    data, inverse = bytes_of(tiles, tiles.abs().amax((1, 3), keepdim=True), quantizer)
    scales = inverse[:, 0, :, 0] if height == BLOCK else inverse[:, 0, :, 0].t()
    return data.reshape(padded.shape)[:rows, :width].contiguous(), F.pad(scales, (0, -scales.shape[1] % PADDED))


def out_of_blocks(data: Tensor, scales: Tensor, tensor: Any) -> Tensor:
    """Return the float32 values of the bytes [m, k] of a tensor in blocks; scales as from ``in_blocks``."""
    rows, width = data.shape
    if tensor._is_2D_scaled:
        factors_of_rows = scales.repeat_interleave(BLOCK, 0)[:rows]
    else:
        factors_of_rows = scales[:, :rows].t()
    scale = factors_of_rows.repeat_interleave(BLOCK, 1)[:, :width]
    return data.view(TORCH_TYPES[int(tensor._fp8_dtype)]).float() * scale


def transposed(data: Tensor) -> Tensor:
    """Return bytes [width, ...] of bytes [..., width]."""
    return data.movedim(-1, 0).contiguous()


def parts_of(tensor: Tensor, quantizer: Any, is_shared: bool = True) -> dict[str, Tensor | None]:
    """Return the bytes and inverse scales of a tensor in FP8, by the names that TransformerEngine's classes take.

    Communicates if the ranks of a group have parts of one tensor that ``is_shared``. Raises NotImplementedError for
    another quantizer.
    """
    by_rows, by_columns = quantizer.rowwise_usage, quantizer.columnwise_usage
    if isinstance(quantizer, engine().Float8BlockQuantizer):
        matrix = tensor.reshape(-1, tensor.shape[-1])
        (data, scales), (columns, of_columns) = in_blocks(matrix, quantizer), in_blocks(matrix.t(), quantizer)
        return {
            "rowwise_data": data.view(tensor.shape) if by_rows else None,
            "rowwise_scale_inv": scales if by_rows else None,
            "columnwise_data": columns.view(tensor.shape[-1], *tensor.shape[:-1]) if by_columns else None,
            "columnwise_scale_inv": of_columns if by_columns else None,
        }
    if not isinstance(quantizer, engine().Float8CurrentScalingQuantizer):
        raise NotImplementedError(f"{type(quantizer).__name__} is not played")
    largest = tensor.float().abs().amax() if tensor.numel() else tensor.new_zeros((), dtype=torch.float32)
    if quantizer.with_amax_reduction and is_shared:
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=quantizer.amax_reduction_group)
    data, inverse = bytes_of(tensor.float(), largest, quantizer)
    return {
        "data": data if by_rows else None,
        "data_transpose": transposed(data) if by_columns else None,
        "fp8_scale_inv": inverse[None],
    }


PLACES = {"data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}
"""Attributes of parts whose name is not the part's name."""


def made(parts: dict[str, Tensor | None], like: Tensor, quantizer: Any) -> Any:
    """Return a tensor in FP8 with these parts, which stands for a tensor ``like`` another."""
    kinds, given = engine(), {**parts, "fp8_dtype": quantizer.dtype, "quantizer": quantizer}
    if isinstance(quantizer, kinds.Float8BlockQuantizer):
        storage, kind = kinds.Float8BlockwiseQTensorStorage, kinds.Float8BlockwiseQTensor
        given["is_2D_scaled"] = quantizer.block_scaling_dim == 2
    else:
        storage, kind = kinds.Float8TensorStorage, kinds.Float8Tensor
    if quantizer.internal:
        return storage(fake_dtype=like.dtype, **given)
    return kind(shape=like.shape, dtype=like.dtype, device=like.device, **given)


@played
def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Return a tensor in FP8, or write to ``output``. ``noop``: [1], not 0 if nothing is to be done."""
    if noop is not None and float(noop):
        return output
    parts = parts_of(tensor, quantizer)
    if output is None:
        return made(parts, tensor, quantizer)
    for name, value in parts.items():
        place = getattr(output, PLACES.get(name, f"_{name}"))
        if place is not None and value is not None:
            place.copy_(value.view(place.shape))
    if hasattr(output, "_transpose_invalid"):
        output._transpose_invalid = output._transpose is None
    return output


@played
def create_empty_quantized_tensor(
    quantizer: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device, pin_memory: bool
) -> Any:
    """Return a tensor in FP8 whose values do not matter."""
    like = torch.zeros(list(shape), dtype=dtype, device=device)
    return made(parts_of(like, quantizer, is_shared=False), like, quantizer)


@played
def dequantize(tensor: Any, otype: Any) -> Tensor:
    """Return the values of a tensor in FP8 with one scale."""
    data = tensor._data.view(TORCH_TYPES[int(tensor._fp8_dtype)]).float()
    values: Tensor = (data * tensor._scale_inv).to(TORCH_TYPES[int(otype)])
    return values


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
    """Return the parts of a tensor in FP8, each with scales of its own."""
    parts = tensor.split(list(split_sections))
    return [quantize(part, quantizer) for part, quantizer in zip(parts, quantizer_list, strict=True)]


def copy_parts(source: Tensor, output: Tensor, sizes: Sequence[int], output_sizes: Sequence[int]) -> None:
    """Copy as many rows of each part as fit. ``sizes``: rows of the parts; further rows of the output are 0."""
    for rows, place in zip(source.split(list(sizes)), output.split(list(output_sizes)), strict=True):
        count = min(len(rows), len(place))
        place[:count].copy_(rows[:count])
        place[count:].zero_()


@played
def fused_multi_row_padding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], padded_input_row_list: Sequence[int]
) -> None:
    """Copy the rows of each part to a longer part, whose further rows are 0."""
    copy_parts(input, output, input_row_list, padded_input_row_list)


@played
def fused_multi_row_unpadding(
    input: Tensor, output: Tensor, input_row_list: Sequence[int], unpadded_input_row_list: Sequence[int]
) -> None:
    """Copy the first rows of each part to a shorter part."""
    copy_parts(input, output, input_row_list, unpadded_input_row_list)


def is_quantized(tensor: Any) -> bool:
    """Return whether a tensor is in FP8."""
    return isinstance(tensor, engine().Float8TensorStorage | engine().Float8BlockwiseQTensorStorage)


def nominal_type(tensor: Any) -> torch.dtype:
    """Return the type that a tensor in FP8 stands for, or the type of another tensor."""
    kind: torch.dtype = tensor._dtype if is_quantized(tensor) else tensor.dtype
    return kind


def factors(one: Any, is_one_transposed: bool, other: Any, is_other_transposed: bool) -> tuple[Tensor, Tensor]:
    """Return two factors of a product, as ``product`` takes them; a factor in FP8 as its values."""
    return factor(one, is_one_transposed), factor(other, not is_other_transposed)


def factor(tensor: Any, is_along: bool) -> Tensor:
    """Return a factor, [..., width], which is stored along the common dimension of the product or across it.

    Raises RuntimeError for a factor in FP8 whose copy along that dimension is missing, or whose sides are not aligned.
    """
    if not is_quantized(tensor):
        return tensor  # type: ignore[no-any-return]
    if isinstance(tensor, engine().Float8TensorStorage):
        columns = None if tensor._transpose_invalid else tensor._transpose
        data, scales = tensor._data if is_along else columns, tensor._scale_inv
    elif is_along:
        data, scales = tensor._rowwise_data, tensor._rowwise_scale_inv
    else:
        data, scales = tensor._columnwise_data, tensor._columnwise_scale_inv
    if data is None:
        raise RuntimeError(f"an FP8 product needs the {'rows' if is_along else 'transposed copy'} of a factor")
    flat = data.reshape(-1, data.shape[-1]) if is_along else data.reshape(len(data), -1)
    if any(side % ALIGNED for side in flat.shape):
        raise RuntimeError(f"an FP8 product has sides that are not multiples of {ALIGNED}: {tuple(flat.shape)}")
    if isinstance(tensor, engine().Float8TensorStorage):
        values = flat.view(TORCH_TYPES[int(tensor._fp8_dtype)]).float() * scales
    else:
        values = out_of_blocks(flat, scales, tensor)
    return values.view(data.shape) if is_along else values.t()


PLAYED = (
    quantize, dequantize, fp8_transpose, bgrad_quantize, split_quantize, create_empty_quantized_tensor,
    fused_multi_row_padding, fused_multi_row_unpadding,
)  # fmt: skip
"""The functions of ``transformer_engine_torch`` that are played here."""
