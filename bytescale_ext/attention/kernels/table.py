"""The table of attention kernels, and the choice of a kernel.

All kernels share a contract (``contract.py``). ``choose_kernel`` returns the first row of the table that supports the
inputs and passes a probe: it computes a few small documents on the device, which are compared with the reference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from bytescale_ext.attention.kernels import efficient, torch_ops
from bytescale_ext.attention.kernels.contract import BackwardFunction, ForwardFunction, Gradients, Output, Saved
from bytescale_ext.attention.kernels.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.attention.merge import JoinFunction, choose_join, join_

HALF = (torch.bfloat16, torch.float16)
PROBE_SECONDS: Final = 300.0
"""Time limit of a probe in a child process, which imports torch and starts CUDA."""


@dataclass(frozen=True)
class Kernel:
    """A row of the table.

    Attributes:
        name: name of the kernel, as in ``choose_kernel(name=...)``.
        devices: supported device types, such as ``("cuda",)``.
        dtypes: supported input dtypes.
        missing: function that returns the package or operator that is missing here, or None. It imports nothing heavy.
        forward, backward: functions of the contract; see ``contract.py``.
        head_dim_multiple: number that must divide ``dim``.
        largest_head_dim: largest supported ``dim``.
        by_name_on: device types on which the kernel is used only if its name is given.
        generations: supported major compute capabilities of a GPU; empty if the probe decides.
        errors_exit: whether an error ends the process, so that the probe needs a process of its own.
        join: function that joins a block to the totals; ``choose_kernel`` sets it for the device.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    missing: Callable[[], str | None]
    forward: ForwardFunction
    backward: BackwardFunction
    head_dim_multiple: int = 1
    largest_head_dim: int = 1 << 30
    by_name_on: tuple[str, ...] = ()
    generations: tuple[int, ...] = ()
    errors_exit: bool = False
    join: JoinFunction = join_

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why the kernel does not support such inputs, or None. Looks for packages, does not use the device."""
        if device.type not in self.devices:
            return f"runs on {'/'.join(self.devices)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"supports {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}, not {dtype}"
        if head_dim % self.head_dim_multiple or head_dim > self.largest_head_dim:
            return (
                f"head dim must be a multiple of {self.head_dim_multiple} up to {self.largest_head_dim}, got {head_dim}"
            )
        return self.missing()

    def wrong_generation(self, device: torch.device) -> str | None:
        """Return why the kernel does not run on a GPU of the device's generation, or None. Starts CUDA."""
        if device.type != "cuda" or not self.generations:
            return None
        major, minor = torch.cuda.get_device_capability(device)
        if major in self.generations:
            return None
        return f"supports compute capability {' and '.join(map(str, self.generations))}, not {major}.{minor}"


class KernelChoice(NamedTuple):
    """The chosen kernel, the reason, and ``(name, why not)`` of each better kernel that was passed over."""

    kernel: Kernel
    reason: str
    considered: tuple[tuple[str, str], ...]


@dataclass
class KernelCalls:
    """Number of calls of a kernel since ``counting`` wrapped it."""

    num_forward: int = 0
    num_backward: int = 0


def counting(kernel: Kernel) -> tuple[Kernel, KernelCalls]:
    """Return a copy of a kernel that counts its calls, and the counts, which later calls update."""
    calls = KernelCalls()

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        calls.num_forward += 1
        return kernel.forward(q, k, v, block)

    def backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
        calls.num_backward += 1
        return kernel.backward(dout, saved, block)

    return replace(kernel, forward=forward, backward=backward), calls


def kernel_table() -> tuple[Kernel, ...]:
    """Return all kernels, best first. The last is ``reference``, which supports everything; on CUDA only by name."""
    operator = torch_ops.missing_operator
    # A failed launch in FlashAttention 3 calls exit(1) instead of raising.
    flash_attn_3 = _cuda_kernel("flash_attn_3", FLASH_ATTN_3.missing, FLASH_ATTN_3.forward, FLASH_ATTN_3.backward)
    return (
        replace(flash_attn_3, generations=(8, 9), errors_exit=True),
        _cuda_kernel("flash_attn", FLASH_ATTN_2.missing, FLASH_ATTN_2.forward, FLASH_ATTN_2.backward),
        _cuda_kernel(
            "torch_flash",
            operator("_flash_attention_forward", "_flash_attention_backward"),
            torch_ops.cuda_flash_forward,
            torch_ops.cuda_flash_backward,
        ),
        _cuda_kernel(
            "torch_cudnn",
            torch_ops.missing_where_deterministic(
                operator("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward")
            ),
            torch_ops.cudnn_forward,
            torch_ops.cudnn_backward,
            largest_head_dim=128,
        ),
        Kernel(
            "torch_efficient",
            ("cuda",),
            (torch.float32, *HALF),
            operator(*efficient.OPERATORS),
            efficient.efficient_forward,
            efficient.efficient_backward,
        ),
        Kernel(
            "cpu_flash",
            ("cpu",),
            (torch.float32, *HALF),
            operator(
                "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
            ),
            torch_ops.cpu_flash_forward,
            torch_ops.cpu_flash_backward,
        ),
        Kernel(
            "reference",
            ("cpu", "cuda"),
            (torch.float64, torch.float32, *HALF),
            lambda: None,
            reference_forward,
            reference_backward,
            by_name_on=("cuda",),  # it stores all scores: 4.3 GB for a document of 8,192 tokens with 16 heads
        ),
    )


def _cuda_kernel(
    name: str,
    missing: Callable[[], str | None],
    forward: ForwardFunction,
    backward: BackwardFunction,
    largest_head_dim: int = 256,
) -> Kernel:
    """Return a row for half precision on CUDA."""
    return Kernel(name, ("cuda",), HALF, missing, forward, backward, 8, largest_head_dim)


def choose_kernel(
    device: torch.device | str, dtype: torch.dtype, head_dim: int, name: str | None = None, windows: bool = False
) -> KernelChoice:
    """Return the best kernel for such inputs, or the kernel of a name. No communication.

    The kernel must also pass ``probe``. So a package of an unknown version is passed over, with the reason, if it
    computes wrong results. ``windows``: whether blocks may have windows.

    Raises:
        ValueError: the named kernel is unknown or does not support the inputs here, or no kernel supports them.
    """
    device = torch.device(device)
    if name is not None:
        kernel = named_kernel(device, dtype, head_dim, name)
        _refuse(name, probe(kernel, device, dtype, head_dim, windows))
        return _with_join(KernelChoice(kernel, "requested by name", ()), device, dtype, head_dim)
    considered: list[tuple[str, str]] = []
    for kernel in kernel_table():
        why_not = kernel.why_not(device, dtype, head_dim)
        if why_not is None and device.type in kernel.by_name_on:
            why_not = f"on {device.type} it must be named, because it stores queries x keys scores"
        why_not = why_not or probe(kernel, device, dtype, head_dim, windows)
        if why_not is None:
            reason = f"the first kernel of the table for {dtype} and head dim {head_dim} on {device.type}"
            return _with_join(KernelChoice(kernel, reason, tuple(considered)), device, dtype, head_dim)
        considered.append((kernel.name, why_not))
    reasons = "; ".join(f"{name}: {why_not}" for name, why_not in considered)
    raise ValueError(f"no attention kernel supports {dtype} with head dim {head_dim} on {device}: {reasons}")


def _with_join(choice: KernelChoice, device: torch.device, dtype: torch.dtype, head_dim: int) -> KernelChoice:
    """Return the choice with the best function that joins blocks on this device."""
    join, why_not = choose_join(device, dtype, head_dim)
    if device.type == "cpu":
        return choice
    join_text = (
        "the fused kernel joins blocks" if why_not is None else f"torch joins blocks, not the fused kernel: {why_not}"
    )
    return choice._replace(kernel=replace(choice.kernel, join=join), reason=f"{choice.reason}; {join_text}")


def named_kernel(device: torch.device | str, dtype: torch.dtype, head_dim: int, name: str) -> Kernel:
    """Return the kernel of a name if it supports such inputs. Does not use the device.

    Raises:
        ValueError: the kernel is unknown, or it does not support the inputs here.
    """
    kernels = {kernel.name: kernel for kernel in kernel_table()}
    if name not in kernels:
        raise ValueError(f"no attention kernel {name!r}; choose one of {', '.join(kernels)}")
    _refuse(name, kernels[name].why_not(torch.device(device), dtype, head_dim))
    return kernels[name]


def _refuse(name: str, why_not: str | None) -> None:
    if why_not is not None:
        raise ValueError(f"attention kernel {name!r} cannot be used: {why_not}; name another kernel, or none")


def probe(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, windows: bool = False) -> str | None:
    """Run a kernel on small inputs and compare the results with the reference. Return why it is unfit, or None.

    A kernel whose errors end the process runs in a child process.
    """
    if why_not := kernel.wrong_generation(device):
        return why_not
    return (_probe_in_child if kernel.errors_exit else probe_here)(kernel, device, dtype, head_dim, windows)


def _probe_in_child(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, windows: bool
) -> str | None:
    """Run ``probe_here`` in a child process, on the same device."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    words = [kernel.name, str(device), str(dtype).removeprefix("torch."), str(head_dim), *["windows"] * windows]
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-m", "bytescale_ext.attention.kernels.probe_child", *words],
            env={**os.environ, "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return f"its probe did not end in {PROBE_SECONDS:.0f} s"
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or ["no message"])[-1]
        return f"its probe ended its process with exit code {ended.returncode}: {last[:200]}"
    return ended.stdout.strip() or None


def probe_here(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int, windows: bool = False
) -> str | None:
    """Run a kernel on small inputs in this process and compare the results with the reference.

    The inputs are three documents, one causal document, and a rectangle with ``out`` and ``lse`` over more keys than
    the kernel is given. ``windows`` adds three documents, and documents with keys before their first query.

    Returns:
        The reason why the kernel is unfit, or None.
    """
    generator = torch.Generator().manual_seed(0)

    def values(rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, head_dim, generator=generator).to(device, dtype)

    packed, whole, part = CuSeqlens((0, 5, 6, 38)), CuSeqlens((0, 38)), CuSeqlens((0, 21))
    q, dout, k, v = values(38, 4), values(38, 4), values(38, 2), values(38, 2)
    scale = head_dim**-0.5
    blocks = [
        AttentionBlock(packed, packed, causal=True, scale=scale),
        AttentionBlock(whole, whole, causal=True, scale=scale),
        AttentionBlock(part, whole, causal=False, scale=scale),
    ]
    if windows:
        fewer = CuSeqlens((0, 3, 4, 30))
        blocks += [AttentionBlock(cu_q, packed, causal=True, scale=scale, window=7) for cu_q in (packed, fewer)]
    for block in blocks:
        rows = slice(0, block.cu_q.num_tokens)
        try:
            error_size = _largest_error(kernel, dout[rows], q[rows], k, v, block)
        except Exception as error:  # packages fail in their own ways
            return f"its probe failed: {type(error).__name__}: {str(error)[:200]}"
        # Written without "larger than", because nan must fail.
        if not error_size < (3e-2 if dtype in HALF else 1e-4):
            return f"its probe differs from the reference by {error_size:.1e} (relative)"
    return None


def _largest_error(
    kernel: Kernel, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock
) -> float:
    """Return the largest relative error of ``out``, ``lse``, ``dq``, ``dk`` and ``dv``.

    ``dout, q``: ``[tq, heads, dim]``; ``k, v``: ``[tk, kv_heads, dim]``.
    """
    expected = out, lse = reference_forward(q, k, v, block)
    if not block.causal:  # the backward pass gets an output and log-sum-exp over further keys
        twice_keys = replace(block, cu_k=CuSeqlens((0, 2 * k.shape[0])))
        out, lse = reference_forward(q, torch.cat((k, v)), torch.cat((v, k)), twice_keys)
    saved = Saved(q, k, v, out, lse)
    results = (*kernel.forward(q, k, v, block), *kernel.backward(dout, saved, block))
    references = (*expected, *reference_backward(dout, saved, block))
    return max(_relative_error(result, reference) for result, reference in zip(results, references, strict=True))


def _relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference divided by the largest expected value; infinity if the shapes differ."""
    if result.shape != expected.shape:
        return float("inf")
    difference = (result.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))
