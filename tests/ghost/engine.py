"""TransformerEngine on ghost GPUs: its own Python over a played ``transformer_engine_torch``. Apex's fused product too.

``make engine`` unpacks the Python of the release in ``.venv/engine``. The module of compiled functions is played here:
the functions that layers and optimizers in bf16, float32 and FP8 (``fp8.py``) call, by their public signatures
(``pybind.cpp``). Other functions raise NotImplementedError when they are called. As on a GPU, tensors must be on the
device.
"""

from __future__ import annotations

import enum
import os
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ghost import fp8
from tests.ghost.played import TORCH_TYPES, DType, played, refuse

FOLDER = Path(__file__).resolve().parents[2] / ".venv/engine"

APEX = "GHOST_APEX"
"""Environment variable of a machine with Apex."""
NO_LIBRARIES = {"NVTE_PROJECT_BUILDING": "1"}
"""Environment variables that keep TransformerEngine from looking for its libraries."""

needs_engine = pytest.mark.skipif(not FOLDER.is_dir(), reason="no TransformerEngine: run make engine")

Tensor = torch.Tensor
TensorLists = Sequence[Sequence[Tensor]]


class NVTE_Fused_Attn_Backend(enum.IntEnum):
    """Backends of fused attention."""

    NVTE_No_Backend = -1
    NVTE_F16_arbitrary_seqlen = 1
    NVTE_FP8 = 2


def product(one: Tensor, is_one_transposed: bool, other: Tensor, is_other_transposed: bool) -> Tensor:
    """Return the float32 product of matrices as cuBLAS orders them: by columns, so the second comes first here."""
    one, other = (matrix.reshape(-1, matrix.shape[-1]).float() for matrix in (one, other))
    return (other.t() if is_other_transposed else other) @ (one.t() if is_one_transposed else one)


def store(result: Tensor, place: Tensor, accumulate: bool) -> Tensor:
    """Write or add a product to a tensor of as many elements, and return the tensor."""
    flat = place.view(result.shape)
    flat.copy_(flat.float() + result if accumulate else result)
    return place


@played
def generic_gemm(
    A: Tensor, transA: bool, B: Tensor, transB: bool, D: Tensor | None, quantizer: Any, output_dtype: Any,
    bias: Tensor | None, bias_type: Any, gelu: bool, gelu_in: Tensor | None, grad: bool, workspace: Tensor,
    workspace_size: int, accumulate: bool, use_split_accumulator: bool, comm_overlap: Any = None, comm_type: Any = None,
    extra_output: Any = None, bulk_overlap: bool = False, alpha: float = 1.0, beta: float | None = None,
) -> list[Tensor | None]:  # fmt: skip
    """Return the product, the gradient of the bias, and nothing for GELU and for overlapped communication."""
    refuse(quantizer=quantizer, gelu=gelu, comm_overlap=comm_overlap, bulk_overlap=bulk_overlap)
    default = fp8.nominal_type(A)
    A, B = fp8.factors(A, transA, B, transB)
    result, bias_gradient = alpha * product(A, transA, B, transB), None
    if bias is not None and grad:
        bias_gradient = B.reshape(-1, B.shape[-1]).float().sum(0).to(bias.dtype)
    elif bias is not None:
        result = result + bias.float()
    if D is not None:
        return [store(result, D, accumulate), bias_gradient, None, None]
    dtype = default if output_dtype is None else TORCH_TYPES[int(output_dtype)]
    shape = result.shape if transB else (*B.shape[:-1], result.shape[-1])
    return [result.to(dtype).view(shape), bias_gradient, None, None]


@played
def te_general_grouped_gemm(
    A: Sequence[Tensor], transa: bool, B: Sequence[Tensor], transb: bool, D: Sequence[Tensor], D_type: Any,
    m_splits: Sequence[int], bias: Sequence[Tensor], bias_type: Any, single_output: bool,
    pre_gelu_out: Sequence[Tensor], grad: bool, workspaces: Sequence[Tensor], workspace_size: int, accumulate: bool,
    use_split_accumulator: bool, num_sms: int,
) -> Sequence[Tensor]:  # fmt: skip
    """Write the product of each pair to ``D``, whose single tensor may hold the rows of all; return the biases."""
    refuse(bias=any(one.numel() for one in bias), gelu=any(one.numel() for one in pre_gelu_out))
    places = list(D[0].split(list(m_splits))) if single_output else D
    for one, other, place in zip(A, B, places, strict=True):
        one, other = fp8.factors(one, transa, other, transb)
        if place.numel() and not other.numel():
            store(place.new_zeros(place.shape, dtype=torch.float32), place, accumulate)
        elif place.numel():
            store(product(one, transa, other, transb), place, accumulate)
    return bias


def scale_of(weight: Tensor, zero_centered_gamma: bool) -> Tensor:
    return weight.float() + int(zero_centered_gamma)


def stored_norm(result: Tensor, ln_out: Tensor | None, quantizer: Any, otype: Any) -> Tensor:
    """Return normalized rows in the type of the layer, or quantized."""
    rows = result.to(TORCH_TYPES[int(otype)])
    if quantizer is not None:
        quantized: Tensor = fp8.quantize(rows, quantizer, ln_out)
        return quantized
    return rows if ln_out is None else ln_out.copy_(rows)


@played
def rmsnorm_fwd(
    input: Tensor, weight: Tensor, eps: float, ln_out: Tensor | None, quantizer: Any, otype: Any, sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Return the normalized rows, None, and the inverse root mean square of each row."""
    rows = input.float()
    inverse = torch.rsqrt(rows.square().mean(-1) + eps)
    result = rows * inverse[:, None] * scale_of(weight, zero_centered_gamma)
    return [stored_norm(result, ln_out, quantizer, otype), None, inverse]


@played
def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return the gradients of the rows and of the weight."""
    gradient, normal = dz.float(), x.float() * rsigma[:, None]
    scaled = gradient * scale_of(gamma, zero_centered_gamma)
    of_rows = rsigma[:, None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return [of_rows.to(x.dtype), (gradient * normal).sum(0).to(gamma.dtype)]


@played
def layernorm_fwd(
    input: Tensor, weight: Tensor, bias: Tensor | None, eps: float, ln_out: Tensor | None, quantizer: Any, otype: Any,
    sm_margin: int, zero_centered_gamma: bool,
) -> list[Tensor]:  # fmt: skip
    """Return the normalized rows, and the mean and inverse standard deviation of each row."""
    rows = input.float()
    mean, inverse = rows.mean(-1), torch.rsqrt(rows.var(-1, unbiased=False) + eps)
    result = (rows - mean[:, None]) * inverse[:, None] * scale_of(weight, zero_centered_gamma)
    result = result if bias is None else result + bias.float()
    return [stored_norm(result, ln_out, quantizer, otype), mean, inverse]


@played
def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Tensor]:
    """Return the gradients of the rows, of the weight and of the bias."""
    gradient, normal = dz.float(), (x.float() - mu[:, None]) * rsigma[:, None]
    scaled = gradient * scale_of(gamma, zero_centered_gamma)
    centered = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    of_weight, of_bias = (gradient * normal).sum(0), gradient.sum(0)
    return [(rsigma[:, None] * centered).to(x.dtype), of_weight.to(gamma.dtype), of_bias.to(gamma.dtype)]


def turned(rows: Tensor, interleaved: bool) -> Tensor:
    """Return rows [..., width] turned by 90 degrees in the plane of each frequency."""
    if interleaved:
        return torch.stack((-rows[..., 1::2], rows[..., ::2]), -1).flatten(-2)
    first, second = rows.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate(rows: Tensor, freqs: Tensor, interleaved: bool, is_backward: bool) -> Tensor:
    """Return rows [rows, batch, heads, width] turned by their angles, or gradients turned back.

    Raises RuntimeError for frequencies that the kernel does not take.
    """
    if freqs.dtype != torch.float32:
        raise RuntimeError("Dtype of the freqs tensor must be float32")
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1):
        raise RuntimeError("expected the second and third dims of the freqs tensor equal 1")
    if freqs.shape[0] < len(rows):
        raise RuntimeError("expected freqs tensor has a longer sequence length than input")
    angles, width = freqs[: len(rows)], freqs.shape[-1]
    part = rows[..., :width].float()
    other = -turned(part * angles.sin(), interleaved) if is_backward else turned(part, interleaved) * angles.sin()
    return torch.cat(((part * angles.cos() + other).to(rows.dtype), rows[..., width:]), -1)


def check_rows_first(start_positions: Any, qkv_format: Any, cu_seqlens: Any, cp_size: int) -> None:
    """Raise NotImplementedError for another layout than [rows, batch, heads, width] of whole sequences."""
    refuse(start_positions=start_positions, cu_seqlens=cu_seqlens, cp_size=cp_size != 1)
    refuse(qkv_format=qkv_format.name != "NVTE_SBHD")


@played
def fused_rope_forward(
    input: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Any, interleaved: bool,
    cu_seqlens: Tensor | None, cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    """Return rows turned by their angles."""
    check_rows_first(start_positions, qkv_format, cu_seqlens, cp_size)
    return rotate(input, freqs, interleaved, is_backward=False)


@played
def fused_rope_backward(
    output_grads: Tensor, freqs: Tensor, start_positions: Tensor | None, qkv_format: Any, interleaved: bool,
    cu_seqlens: Tensor | None, cp_size: int, cp_rank: int,
) -> Tensor:  # fmt: skip
    """Return the gradients of the rows."""
    check_rows_first(start_positions, qkv_format, cu_seqlens, cp_size)
    return rotate(output_grads, freqs, interleaved, is_backward=True)


@played
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the norm of all tensors [1] and, if asked, of each tensor."""
    norms = torch.stack([one.float().norm() for one in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor else norms.new_empty(0)


@played
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """Write the tensors of the first list times a factor to the tensors of the second list."""
    for source, place in zip(*tensor_lists, strict=True):
        place.copy_(source * scale)


multi_tensor_scale_tensor = multi_tensor_scale


@played
def multi_tensor_adam(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, lr: float, beta1: float, beta2: float,
    epsilon: float, step: int, mode: int, bias_correction: int, weight_decay: float,
) -> None:  # fmt: skip
    """Update parameters; the lists are gradients, parameters, means, squares, and float32 parameters if there are."""
    corrections = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, mean, square, *master in zip(*tensor_lists, strict=True):
        value = master[0] if master else parameter
        change = gradient.float() if mode else gradient.float() + weight_decay * value.float()
        mean.mul_(beta1).add_(change, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(change, change, value=1 - beta2)
        update = (mean / corrections[0]) / ((square / corrections[1]).sqrt() + epsilon)
        value.sub_((lr * (update + weight_decay * value.float() if mode else update)).to(value.dtype))
        if master:
            parameter.copy_(value)


def get_cudnn_version() -> int:
    return 92000


def get_cublasLt_version() -> int:
    return 130100


def get_num_cublas_streams() -> int:
    return 4


def get_fused_attn_backend(*args: object, **kwargs: object) -> NVTE_Fused_Attn_Backend:
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend


class NotPlayed:
    """A function or a value of an enumeration that is not played."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(f"{self.name} is not played")

    def __int__(self) -> int:
        return 0


class Enumeration(type):
    """Class of classes whose members exist when something reads them."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = NotPlayed(name)
        setattr(cls, name, value)
        return value


def compiled_module() -> types.ModuleType:
    """Return the module ``transformer_engine_torch``."""
    module = types.ModuleType("transformer_engine_torch")
    for function in (
        generic_gemm, te_general_grouped_gemm, rmsnorm_fwd, rmsnorm_bwd, layernorm_fwd, layernorm_bwd,
        fused_rope_forward, fused_rope_backward, multi_tensor_l2norm, multi_tensor_scale, multi_tensor_adam,
        get_cudnn_version, get_cublasLt_version, get_num_cublas_streams, get_fused_attn_backend, DType,
        NVTE_Fused_Attn_Backend, *fp8.PLAYED,
    ):  # fmt: skip
        setattr(module, function.__name__, function)
    module.multi_tensor_scale_tensor = multi_tensor_scale_tensor  # type: ignore[attr-defined]

    def missing(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Enumeration(name, (), {}) if name[0].isupper() else NotPlayed(name)
        setattr(module, name, value)
        return value

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


def weight_gradients() -> types.ModuleType:
    """Return Apex's ``fused_weight_gradient_mlp_cuda``, which adds the gradient of a weight to its sum."""

    @played
    def wgrad_gemm_accum_fp32(total_input: Tensor, grad_output: Tensor, main_grad: Tensor) -> None:
        store(product(total_input, False, grad_output, True), main_grad, accumulate=True)

    module = types.ModuleType("fused_weight_gradient_mlp_cuda")
    module.__spec__ = ModuleSpec(module.__name__, None)  # the product looks for a spec
    module.wgrad_gemm_accum_fp32 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    module.wgrad_gemm_accum_fp16 = wgrad_gemm_accum_fp32  # type: ignore[attr-defined]
    return module


def install() -> None:
    """Make TransformerEngine importable in this process, before anything imports Megatron."""
    assert not any(name.startswith("megatron.core") for name in sys.modules)
    sys.path.insert(0, str(FOLDER))
    sys.modules["transformer_engine_torch"] = compiled_module()
    if os.environ.get(APEX):
        sys.modules["fused_weight_gradient_mlp_cuda"] = weight_gradients()
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda framework: None
    import transformer_engine.pytorch
