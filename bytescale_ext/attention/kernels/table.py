"""The table of attention kernels, and the choice of a kernel.

All kernels share a contract (``contract.py``). ``choose_kernel`` returns the first row of the table that supports the
inputs and passes a probe: it computes a few documents on the device, which are compared with the reference. A row can
come first on some generations of GPUs: FlashAttention 3 on Hopper, FlashAttention 4 and cuDNN on Blackwell.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch.nn.functional import pad

from bytescale_ext.attention.kernels import efficient, torch_ops
from bytescale_ext.attention.kernels.contract import HALF, BackwardFunction, ForwardFunction, Gradients, Output, Saved
from bytescale_ext.attention.kernels.flash_attn import FLASH_ATTN_2, FLASH_ATTN_3, FLASH_ATTN_4
from bytescale_ext.attention.kernels.probes import failure
from bytescale_ext.attention.kernels.reference import reference_backward, reference_forward
from bytescale_ext.attention.largest import LargestFunction, raise_largest_
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import CuSeqlens
from bytescale_ext.attention.merge import JoinFunction, choose_join, join_

PROBE_SECONDS: Final = 300.0
"""Time limit of a probe in a child process, which imports torch and starts CUDA."""
EDGE_LENGTHS: Final = (63, 64, 65, 127, 128, 129)
LONG_LENGTH: Final = 1025
"""Lengths of a probe's documents on a GPU: one less and one more than tiles of 64 and 128 rows, and many tiles."""

Widths = tuple[int, int]
"""Head dim of queries and keys, and of values."""

HOPPER: Final = 9
BLACKWELL: Final = (10, 11)
"""Major compute capabilities with Blackwell's tensor cores for data centres; 12 has other ones."""
LATENT_WIDTHS: Final = (192, 128)
"""Widths of DeepSeek's latent attention."""
STANDARD_WIDTH: Final = 128
"""Largest width that a kernel supports on all its generations of GPUs."""


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
        first_on: major compute capabilities on which the row precedes the rest of the table.
        widths_on: major compute capability -> supported pairs of head dim and width of values above 128; a capability
            that is not in it has no further limit.
        unequal_widths: pairs of different widths of keys and of values that the kernel takes; None: all pairs. Of other
            pairs the narrower tensors are padded.
        is_probed_apart: whether an error may end the process or break its use of the device, so that the probe needs a
            process of its own.
        join: function that joins a block to the totals; ``choose_kernel`` sets it for the device.
        raise_largest: function that finds the largest scores of a block, if a training measures them.
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
    first_on: tuple[int, ...] = ()
    widths_on: Mapping[int, tuple[Widths, ...]] = field(default_factory=dict)
    unequal_widths: tuple[Widths, ...] | None = ()
    is_probed_apart: bool = False
    join: JoinFunction = join_
    raise_largest: LargestFunction = raise_largest_

    def why_not(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why the kernel does not support such inputs, or None. Looks for packages, does not use the device."""
        return self.why_not_on_type(device.type, dtype, head_dim)

    def why_not_on_type(self, device_type: str, dtype: torch.dtype, head_dim: int) -> str | None:
        """Return why the kernel does not support such inputs on a type of device, see ``why_not``."""
        if device_type not in self.devices:
            return f"runs on {'/'.join(self.devices)}, not on {device_type}"
        if dtype not in self.dtypes:
            return f"supports {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}, not {dtype}"
        if head_dim % self.head_dim_multiple or head_dim > self.largest_head_dim:
            return (
                f"head dim must be a multiple of {self.head_dim_multiple} up to {self.largest_head_dim}, got {head_dim}"
            )
        return self.missing()

    def why_not_on(self, generation: int | None, widths: Widths) -> str | None:
        """Return why the kernel does not run on GPUs of a major compute capability, or None. None: not a GPU."""
        if generation is None:
            return None
        if self.generations and generation not in self.generations:
            return f"supports compute capability {', '.join(map(str, self.generations))}, not {generation}"
        supported = self.widths_on.get(generation)
        if supported is None or max(widths) <= STANDARD_WIDTH or widths in supported:
            return None
        return f"on compute capability {generation} it does not support head dim {widths[0]}, values of {widths[1]}"

    def takes(self, widths: Widths) -> bool:
        """Return whether the kernel takes keys and values of these widths without padding."""
        return widths[0] == widths[1] or self.unequal_widths is None or widths in self.unequal_widths

    def with_padding(self, widths: Widths) -> Kernel:
        """Return the kernel for keys and values of different widths: it pads the narrower tensors with zeros.

        Zeros change neither scores nor values. Outputs and gradients keep the widths of the contract.
        """
        dim, value_dim = widths

        def padded(x: torch.Tensor) -> torch.Tensor:
            return pad(x, (0, max(widths) - x.shape[2])) if x.shape[2] < max(widths) else x

        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
            out, lse = self.forward(padded(q), padded(k), padded(v), block)
            return out[..., :value_dim].contiguous(), lse

        def backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
            q, k, v, out, lse = saved
            whole = Saved(padded(q), padded(k), padded(v), padded(out), lse)
            dq, dk, dv = self.backward(padded(dout), whole, block)
            return dq[..., :dim], dk[..., :dim], dv[..., :value_dim]

        return replace(self, forward=forward, backward=backward)


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
    return (
        *_package_kernels(),
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
            first_on=BLACKWELL,  # the flash attention of torch and of version 2 has Ampere's instructions there
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
            unequal_widths=None,
            by_name_on=("cuda",),  # it stores all scores: 4.3 GB for a document of 8,192 tokens with 16 heads
        ),
    )


def _package_kernels() -> tuple[Kernel, ...]:
    """Return the rows of the flash-attn packages."""
    version_3, version_2, version_4 = (
        _cuda_kernel(name, package.missing, package.forward, package.backward)
        for name, package in (
            ("flash_attn_3", FLASH_ATTN_3),
            ("flash_attn", FLASH_ATTN_2),
            ("flash_attn_4", FLASH_ATTN_4),
        )
    )
    return (
        replace(
            version_3,
            generations=(8, 9),
            first_on=(HOPPER,),
            unequal_widths=(LATENT_WIDTHS,),
            is_probed_apart=True,  # a failed launch calls exit(1) instead of raising
        ),
        version_2,
        replace(
            version_4,
            generations=(HOPPER, *BLACKWELL, 12),
            first_on=(HOPPER, *BLACKWELL),
            widths_on=dict.fromkeys(BLACKWELL, (LATENT_WIDTHS, (256, 256))),
            unequal_widths=(LATENT_WIDTHS,),
            is_probed_apart=True,  # its kernels are compiled here, and a faulty kernel breaks CUDA in its process
        ),
    )


def _cuda_kernel(
    name: str,
    missing: Callable[[], str | None],
    forward: ForwardFunction,
    backward: BackwardFunction,
    largest_head_dim: int = 256,
    first_on: tuple[int, ...] = (),
) -> Kernel:
    """Return a row for half precision on CUDA."""
    return Kernel(name, ("cuda",), HALF, missing, forward, backward, 8, largest_head_dim, first_on=first_on)


def ordered_kernels(generation: int | None) -> list[Kernel]:
    """Return all kernels, best first for GPUs of a major compute capability; None: not a GPU."""
    return sorted(kernel_table(), key=lambda kernel: generation not in kernel.first_on)


def generation_of(device: torch.device) -> int | None:
    """Return the major compute capability of a GPU, or None for another device. Starts CUDA."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else None


def expected_kernels(generation: int, dtype: torch.dtype, head_dim: int) -> tuple[str, str]:
    """Return the names of the kernels that GPUs of a major compute capability would use if all probes passed.

    Returns:
        The kernel with the packages that are installed here, and the kernel with all packages.
    """
    rows = [
        kernel
        for kernel in ordered_kernels(generation)
        if "cuda" not in kernel.by_name_on and kernel.why_not_on(generation, (head_dim, head_dim)) is None
    ]
    whole = [replace(kernel, missing=lambda: None) for kernel in rows]
    here, best = (
        next(row.name for row in table if row.why_not_on_type("cuda", dtype, head_dim) is None)
        for table in (rows, whole)
    )
    return here, best


def choose_kernel(
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
    name: str | None = None,
    windows: bool = False,
    value_dim: int | None = None,
) -> KernelChoice:
    """Return the best kernel for such inputs, or the kernel of a name. No communication.

    The kernel must also pass ``probe``. So a package of an unknown version is passed over, with the reason, if it
    computes wrong results.

    Args:
        device: device of the inputs.
        dtype: dtype of the inputs.
        head_dim: size of a head of queries and keys.
        name: name of the kernel; None: the first that fits.
        windows: whether blocks may have windows.
        value_dim: size of a head of values; None: ``head_dim``.

    Raises:
        ValueError: the named kernel is unknown or does not support the inputs here, or no kernel supports them.
    """
    device = torch.device(device)
    widths = head_dim, value_dim or head_dim
    if name is not None:
        kernel = named_kernel(device, dtype, max(widths), name)
        _refuse(name, probe(kernel, device, dtype, head_dim, windows, value_dim))
        return _ready(KernelChoice(kernel, "requested by name", ()), device, dtype, widths)
    considered: list[tuple[str, str]] = []
    for kernel in ordered_kernels(generation_of(device)):
        why_not = kernel.why_not(device, dtype, max(widths))
        if why_not is None and device.type in kernel.by_name_on:
            why_not = f"on {device.type} it must be named, because it stores queries x keys scores"
        why_not = why_not or probe(kernel, device, dtype, head_dim, windows, value_dim)
        if why_not is None:
            reason = f"the first kernel of the table for {dtype} and head dim {head_dim} on {device.type}"
            return _ready(KernelChoice(kernel, reason, tuple(considered)), device, dtype, widths)
        considered.append((kernel.name, why_not))
    reasons = "; ".join(f"{name}: {why_not}" for name, why_not in considered)
    raise ValueError(f"no attention kernel supports {dtype} with head dim {head_dim} on {device}: {reasons}")


def _ready(choice: KernelChoice, device: torch.device, dtype: torch.dtype, widths: Widths) -> KernelChoice:
    """Return the choice, with padding if its kernel needs it, and with the best function that joins blocks here."""
    if widths[0] != widths[1]:
        takes = choice.kernel.takes(widths)
        reason = f"{choice.reason}; keys of {widths[0]} and values of {widths[1]} are {'not ' * takes}padded"
        choice = choice._replace(kernel=choice.kernel if takes else choice.kernel.with_padding(widths), reason=reason)
    join, why_not = choose_join(device, dtype, widths[1])
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


def probe(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    windows: bool = False,
    value_dim: int | None = None,
) -> str | None:
    """Run a kernel on small inputs and compare the results with the reference. Return why it is unfit, or None.

    A kernel whose errors may break this process runs in a child process.

    Args:
        kernel: row of the table.
        device: device of the inputs.
        dtype: dtype of the inputs.
        head_dim: size of a head.
        windows: whether blocks may have windows.
        value_dim: size of a head of values; None: ``head_dim``.
    """
    widths = head_dim, value_dim or head_dim
    if not kernel.takes(widths):
        widths = max(widths), max(widths)
    if why_not := kernel.why_not_on(generation_of(device), widths):
        return why_not
    return (_probe_in_child if kernel.is_probed_apart else probe_here)(kernel, device, dtype, widths, windows)


def _probe_in_child(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, widths: Widths, windows: bool
) -> str | None:
    """Run ``probe_here`` in a child process, on the same device."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    words = [kernel.name, str(device), str(dtype).removeprefix("torch."), *map(str, widths), *["windows"] * windows]
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
    kernel: Kernel, device: torch.device, dtype: torch.dtype, widths: Widths, windows: bool = False
) -> str | None:
    """Run a kernel on the blocks of ``probe_blocks`` in this process and compare the results with the reference.

    Returns:
        The reason why the kernel is unfit, or None.
    """
    head_dim, value_dim = widths
    for block in probe_blocks(head_dim**-0.5, windows, on_gpu=device.type == "cuda"):
        generator = torch.Generator().manual_seed(0)
        num_q, num_k = block.cu_q.num_tokens, block.cu_k.num_tokens
        q, dout, k, v = (
            torch.randn(rows, heads, dim, generator=generator).to(device, dtype)
            for rows, heads, dim in (
                (num_q, 4, head_dim),
                (num_q, 4, value_dim),
                (num_k, 2, head_dim),
                (num_k, 2, value_dim),
            )
        )
        try:
            error_size = _largest_error(kernel, dout, q, k, v, block)
        except Exception as error:
            return failure(error)
        # Written without "larger than", because nan must fail.
        if not error_size < (3e-2 if dtype in HALF else 1e-4):
            return f"its probe differs from the reference by {error_size:.1e} (relative)"
    return None


def probe_blocks(scale: float, windows: bool, on_gpu: bool) -> list[AttentionBlock]:
    """Return the blocks of a probe.

    They are three documents, one causal document, and a rectangle, whose ``out`` and ``lse`` are over more keys than
    the kernel is given. Windows add three documents, and documents with keys before their first query. A GPU adds
    documents that end at the edges of tiles, and a long document.
    """
    packed, whole, part = CuSeqlens((0, 5, 6, 38)), CuSeqlens((0, 38)), CuSeqlens((0, 21))
    blocks = [
        AttentionBlock(packed, packed, causal=True, scale=scale),
        AttentionBlock(whole, whole, causal=True, scale=scale),
        AttentionBlock(part, whole, causal=False, scale=scale),
    ]
    if windows:
        fewer = CuSeqlens((0, 3, 4, 30))
        blocks += [AttentionBlock(cu_q, packed, causal=True, scale=scale, window=7) for cu_q in (packed, fewer)]
    if on_gpu:
        edges, long = CuSeqlens.of_lengths(EDGE_LENGTHS), CuSeqlens((0, LONG_LENGTH))
        blocks += [
            AttentionBlock(edges, edges, causal=True, scale=scale),
            AttentionBlock(long, long, causal=True, scale=scale),
            AttentionBlock(CuSeqlens((0, EDGE_LENGTHS[-1])), long, causal=False, scale=scale),
        ]
    return blocks


def _largest_error(
    kernel: Kernel, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock
) -> float:
    """Return the largest relative error of ``out``, ``lse``, ``dq``, ``dk`` and ``dv``.

    ``q``: ``[tq, heads, dim]``; ``k``: ``[tk, kv_heads, dim]``; ``dout`` and ``v`` may have another last size.
    """
    expected = out, lse = reference_forward(q, k, v, block)
    if not block.causal:  # the backward pass gets an output and log-sum-exp over further keys
        twice_keys = replace(block, cu_k=CuSeqlens((0, 2 * k.shape[0])))
        out, lse = reference_forward(q, torch.cat((k, -k.flip(0))), torch.cat((v, v.flip(0))), twice_keys)
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
