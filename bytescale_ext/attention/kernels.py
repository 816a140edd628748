"""The table of attention kernels, and the choice of one.

A kernel computes attention of packed documents, forward and backward, and gives the log-sum-exp that lets
blocks of keys be joined. One contract for all of them::

    forward(q, k, v, cu_q, cu_k, causal, scale)                   -> out, lse
    backward(dout, q, k, v, out, lse, cu_q, cu_k, causal, scale)  -> dq, dk, dv

``q, out, dout`` are ``[tq, heads, dim]``, ``k, v`` are ``[tk, kv_heads, dim]`` (``heads`` a multiple of
``kv_heads``), ``lse`` is ``[heads, tq]``, natural log, float32 (float64 for float64 inputs). Document i's
queries ``cu_q[i]..`` see document i's keys ``cu_k[i]..``: all of them, or with ``causal`` (which asks for equal
offsets) those not after the query. The backward takes the ``out`` and ``lse`` over *all* keys of the queries,
also keys outside this call (FlashAttention-2, Algorithm 2: ``delta = rowsum(dout * out)``), so that the
gradients of blocks add up. No kernel communicates, and none waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from bytescale_ext.attention import flash_attn_package, torch_kernels
from bytescale_ext.attention.rows import CuSeqlens

Tensors2 = tuple[torch.Tensor, torch.Tensor]
Tensors3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ForwardFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, CuSeqlens, CuSeqlens, bool, float], Tensors2]
BackwardFunction = Callable[..., Tensors3]

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    Attributes:
        name: what ``choose_kernel(name=...)`` takes.
        devices: device types, e.g. ``("cuda",)``.
        dtypes: input dtypes.
        missing: why it cannot run here (a package, an operator), or None. Imports nothing heavy.
        forward, backward: see the module's docstring.
        head_dim_multiple, largest_head_dim: limits of ``dim``.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    missing: Callable[[], str | None]
    forward: ForwardFunction
    backward: BackwardFunction
    head_dim_multiple: int = 1
    largest_head_dim: int = 1 << 30

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Why this kernel cannot take such inputs, or None. Pure apart from looking for packages."""
        if device.type not in self.devices:
            return f"runs on {'/'.join(self.devices)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"takes {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}, not {dtype}"
        if head_dim % self.head_dim_multiple or head_dim > self.largest_head_dim:
            return (
                f"head dim must be a multiple of {self.head_dim_multiple} up to {self.largest_head_dim}, got {head_dim}"
            )
        return self.missing()


class KernelChoice(NamedTuple):
    """The kernel, why it was chosen, and ``(name, why not)`` of each better one that was passed over."""

    kernel: Kernel
    reason: str
    considered: tuple[tuple[str, str], ...]


@dataclass
class KernelCalls:
    """Calls of a kernel since ``counting`` made it: ``num_forward`` and ``num_backward``."""

    num_forward: int = 0
    num_backward: int = 0


def counting(kernel: Kernel) -> tuple[Kernel, KernelCalls]:
    """The same kernel with its calls counted, and the counts, which go on as it is called."""
    calls = KernelCalls()

    def forward(*arguments: Any) -> Tensors2:
        calls.num_forward += 1
        return kernel.forward(*arguments)

    def backward(*arguments: Any) -> Tensors3:
        calls.num_backward += 1
        return kernel.backward(*arguments)

    return replace(kernel, forward=forward, backward=backward), calls


def kernel_table() -> tuple[Kernel, ...]:
    """Every kernel, best first. ``reference`` is last and takes everything."""
    return (
        *_cuda_kernels(),
        Kernel(
            "cpu_flash",
            ("cpu",),
            (torch.float32, *HALF),
            torch_kernels.missing_operator(
                "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
            ),
            torch_kernels.cpu_flash_forward,
            torch_kernels.cpu_flash_backward,
        ),
        Kernel(
            "reference",
            ("cpu", "cuda"),
            (torch.float64, torch.float32, *HALF),
            lambda: None,
            torch_kernels.reference_documents_forward,
            torch_kernels.reference_documents_backward,
        ),
    )


def _cuda_kernels() -> tuple[Kernel, ...]:
    return (
        Kernel(
            "flash_attn_3",
            ("cuda",),
            HALF,
            flash_attn_package.missing_3,
            flash_attn_package.forward_3,
            flash_attn_package.backward_3,
            head_dim_multiple=8,
            largest_head_dim=256,
        ),
        Kernel(
            "flash_attn",
            ("cuda",),
            HALF,
            flash_attn_package.missing_2,
            flash_attn_package.forward_2,
            flash_attn_package.backward_2,
            head_dim_multiple=8,
            largest_head_dim=256,
        ),
        Kernel(
            "torch_flash",
            ("cuda",),
            HALF,
            torch_kernels.missing_operator("_flash_attention_forward", "_flash_attention_backward"),
            torch_kernels.cuda_flash_forward,
            torch_kernels.cuda_flash_backward,
            head_dim_multiple=8,
            largest_head_dim=256,
        ),
        Kernel(
            "torch_cudnn",
            ("cuda",),
            HALF,
            torch_kernels.missing_operator(
                "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward"
            ),
            torch_kernels.cudnn_forward,
            torch_kernels.cudnn_backward,
            head_dim_multiple=8,
            largest_head_dim=128,
        ),
    )


def choose_kernel(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, name: str | None = None
) -> KernelChoice:
    """The best kernel for such inputs, or the one named.

    A candidate must also pass ``probe`` (a few small documents on the device against the reference), so that a
    package of another version is passed over with its reason, never used wrongly. No communication.

    Raises:
        ValueError: the named kernel is unknown or cannot take these inputs here.
    """
    device = torch.device(device)
    if name is not None:
        kernel = named_kernel(device, dtype, head_dim, name)
        _refuse(name, probe(kernel, device, dtype, head_dim))
        return KernelChoice(kernel, "asked for by name", ())
    considered: list[tuple[str, str]] = []
    for kernel in kernel_table():
        why_not = kernel.why_not(device, dtype, head_dim) or probe(kernel, device, dtype, head_dim)
        if why_not is None:
            reason = f"the first of the table that takes {dtype} of head dim {head_dim} on {device.type}"
            return KernelChoice(kernel, reason, tuple(considered))
        considered.append((kernel.name, why_not))
    raise ValueError(f"no attention kernel takes {dtype} of head dim {head_dim} on {device}: {considered}")


def named_kernel(device: torch.device | str, dtype: torch.dtype, head_dim: int, name: str) -> Kernel:
    """The kernel of that name, if its row of the table takes such inputs. Uses no device: good before there is one.

    Raises:
        ValueError: the kernel is unknown or cannot take these inputs here.
    """
    table = kernel_table()
    found = [kernel for kernel in table if kernel.name == name]
    if not found:
        raise ValueError(f"no attention kernel {name!r}; choose one of {', '.join(kernel.name for kernel in table)}")
    _refuse(name, found[0].why_not(torch.device(device), dtype, head_dim))
    return found[0]


def _refuse(name: str, why_not: str | None) -> None:
    if why_not is not None:
        raise ValueError(f"attention kernel {name!r} cannot be used: {why_not}; leave the choice open or take another")


def probe(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Run a kernel on small inputs and compare with the reference; why it is not fit, or None.

    Three documents, one causal document, and a rectangle whose ``out`` and ``lse`` cover more keys than it is given.
    """
    generator = torch.Generator().manual_seed(0)

    def values(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, head_dim, generator=generator).to(device, dtype)

    packed, whole = CuSeqlens((0, 5, 6, 38)), CuSeqlens((0, 38))
    q, dout, k, v = values(38, 4), values(38, 4), values(38, 2), values(38, 2)
    cases = (
        (q, packed, packed, True),
        (q, whole, whole, True),
        (q[:21], CuSeqlens((0, 21)), whole, False),
    )
    for queries, cu_q, cu_k, causal in cases:
        block = (queries, k, v, cu_q, cu_k, causal, head_dim**-0.5)
        try:
            error_size = _largest_error(kernel, dout[: queries.shape[0]], *block)
        except (RuntimeError, TypeError, ValueError, ImportError, AttributeError) as error:
            return f"its probe failed: {type(error).__name__}: {str(error)[:200]}"
        # Not "larger than": nan must fail.
        if not error_size < (3e-2 if dtype in HALF else 1e-4):
            return f"its probe differs from the reference by {error_size:.1e} (relative)"
    return None


def _largest_error(
    kernel: Kernel,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: CuSeqlens,
    cu_k: CuSeqlens,
    causal: bool,
    scale: float,
) -> float:
    """The largest relative error of out, lse, dq, dk and dv; a rectangle's lse covers other keys as well."""
    reference_forward = torch_kernels.reference_documents_forward
    expected = out, lse = reference_forward(q, k, v, cu_q, cu_k, causal, scale)
    if not causal:
        twice = CuSeqlens((0, 2 * k.shape[0]))
        out, lse = reference_forward(q, torch.cat((k, v)), torch.cat((v, k)), cu_q, twice, False, scale)
    saved = (dout, q, k, v, out, lse)
    got = kernel.forward(q, k, v, cu_q, cu_k, causal, scale)
    got_grads = kernel.backward(*saved, cu_q, cu_k, causal, scale)
    grads = torch_kernels.reference_documents_backward(*saved, cu_q, cu_k, causal, scale)
    return max(_relative_error(a, b) for a, b in zip((*got, *got_grads), (*expected, *grads), strict=True))


def _relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    if got.shape != expected.shape:
        return float("inf")
    difference = (got.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))
