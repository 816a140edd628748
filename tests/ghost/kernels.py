"""Kernels of ghost GPUs: each CUDA operator of torch computes with torch's CPU operator on the same memory.

``install()`` replaces the CUDA kernels of this process. Everything around kernels stays torch's own: the device of
tensors, autograd's threads, streams and events, the caching allocator, process groups. As on a GPU, tensors on
different devices are an error. Operators without a CPU version keep their CUDA kernel, whose launch is an error
(``lib/ghost_cudart.c``). Attention is in ``flash.py`` and ``attention.py``.
"""

from __future__ import annotations

import ctypes
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from tests.ghost import attention, flash, hollow, trace
from tests.ghost.environment import NUM_DEVICES
from tests.ghost.memory import alias, upload

# Operators whose CUDA version launches nothing: views, allocations, and reads by the host.
NATIVE = frozenset(
    "as_strided view _reshape_alias view.dtype unfold detach alias empty.memory_format empty_strided "
    "set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor set_ resize_ record_stream _pin_memory "
    "is_pinned view_as_real view_as_complex is_set_to _efficientzerotensor _nested_view_from_buffer new_empty_strided "
    "_has_same_storage_numel _has_compatible_shallow_copy_type _resize_output_ _fused_sdp_choice _lazy_clone".split()
)
# Operators of GPUs without a CPU version, and operators whose CPU version has another result.
NOT_PLAYED = frozenset(
    "_cudnn_attention_forward _cudnn_attention_backward "
    "_scaled_mm _cudnn_init_dropout_state _use_cudnn_ctc_loss _cudnn_rnn_flatten_weight".split()
)
# Operators that take tensors of the host and of a device together.
MIXED = frozenset("copy_ index.Tensor _index_put_impl_ _to_copy _unsafe_index.Tensor index_put_".split())
# Operators whose result has a shape that the host reads.
READS = frozenset("nonzero masked_select _unique2 unique_dim unique_consecutive equal is_nonzero".split())
HALF = (torch.bfloat16, torch.float16)

_library: torch.library.Library | None = None


def known_devices() -> AbstractContextManager[object]:
    """Tell modules that are imported inside the number of devices, for which some ask.

    Asking the runtime counts as a use of CUDA, and torch refuses CUDA in the children of a process that has used it.
    """
    return mock.patch.object(torch._C, "_cuda_getDeviceCount", return_value=NUM_DEVICES)


def install() -> int:
    """Give CUDA operators these kernels in this process, and return their number."""
    global _library
    assert _library is None, "the kernels are installed already"
    warnings.filterwarnings("ignore", message=".*[Oo]verriding.*kernel.*")
    _library = torch.library.Library("aten", "IMPL")
    replaced = 0
    for full_name in torch._C._dispatch_get_all_op_names():
        space, _, name = full_name.partition("::")
        if space != "aten" or name in NATIVE or name in NOT_PLAYED:
            continue
        if not torch._C._dispatch_has_kernel_for_dispatch_key(full_name, "CUDA") and name != "copy_":
            continue
        base, _, overload = name.partition(".")
        try:
            operator = getattr(getattr(torch.ops.aten, base), overload or "default")
        except (AttributeError, RuntimeError):  # not for Python
            continue
        cpu = CpuKernel.of(operator, name)
        kernel = SPECIAL.get(name) or cpu
        if hollow.is_hollow():
            kernel = hollow.SPECIAL.get(name) or hollow.HollowKernel(cpu, kernel)
        _library.impl(name, kernel, "CUDA", allow_override=True)
        replaced += 1
    return replaced


@dataclass(frozen=True)
class CpuKernel:
    """CUDA kernel of an operator that runs the CPU operator.

    Attributes:
        operator: overload of torch.
        name: its name with the overload.
        written: whether the operator writes to an argument, by argument.
        returned: index of the argument that a result is, or None for a new tensor, by result.
        takes_generator: whether random numbers come from an argument.
    """

    operator: Any
    name: str
    written: tuple[bool, ...]
    returned: tuple[int | None, ...]
    takes_generator: bool

    @classmethod
    def of(cls, operator: Any, name: str) -> CpuKernel:
        """Return the kernel of an operator, from its schema."""
        arguments, returns = operator._schema.arguments, operator._schema.returns
        written = tuple(_is_written(one) for one in arguments)
        returned = tuple(_argument_of(one, arguments) if _is_written(one) else None for one in returns)
        return cls(operator, name, written, returned, any(one.name == "generator" for one in arguments))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = Call(self.name)
        lowered = [self._lower_argument(call, index, value) for index, value in enumerate(args)]
        named = {name: call.lower(value) for name, value in kwargs.items()}
        if "pin_memory" in named:
            named["pin_memory"] = False
        call.check_devices()
        settle_current_stream()
        if self.name in READS or (self.name == "copy_" and _copy_waits(*args)):
            trace.note_wait()
        result = self._compute(call, lowered, named)
        call.copy_back_resized()
        if result is None:
            return None
        values = result if isinstance(result, tuple) else (result,)
        raised = tuple(self._raise(call, index, value, args, kwargs) for index, value in enumerate(values))
        return raised if isinstance(result, tuple) else raised[0]

    def _lower_argument(self, call: Call, index: int, value: Any) -> Any:
        if isinstance(value, bool | int | float) and str(self.operator._schema.arguments[index].type) == "Tensor":
            return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)
        return call.lower(value)

    def _compute(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if self.takes_generator:
            self._replace_generator(call, args, kwargs)
        elif self.name in ("native_dropout", "_fused_dropout"):
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.set_state(generator_of(None, call.device).get_state())
                return self.operator(*args, **kwargs)
        try:
            return self.operator(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if "not implemented for" not in str(error) and "not support" not in str(error).lower():
                raise
            return self._compute_in_float32(args, kwargs, error)

    def _replace_generator(self, call: Call, args: list[Any], kwargs: dict[str, Any]) -> None:
        for index, value in enumerate(args):
            if isinstance(value, torch.Generator):
                args[index] = generator_of(value, call.device)
                return
        kwargs["generator"] = generator_of(kwargs.get("generator"), call.device)

    def _compute_in_float32(self, args: list[Any], kwargs: dict[str, Any], error: Exception) -> Any:
        """Compute a half-precision operator that the CPU lacks in float32, and round its results."""
        half = next((one.dtype for one in args if isinstance(one, torch.Tensor) and one.dtype in HALF), None)
        if half is None:
            raise error
        wide = [_widened(one) for one in args]
        result = self.operator(*wide, **{name: _widened(one) for name, one in kwargs.items()})
        for index, value in enumerate(args):
            if self.written[index] and isinstance(value, torch.Tensor):
                value.copy_(wide[index])
        return _narrowed(result, half)

    def _raise(self, call: Call, index: int, value: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        place = self.returned[index] if index < len(self.returned) else None
        if place is None:
            return call.upload(value)
        return self.argument(place, args, kwargs)

    def argument(self, place: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Return the argument with an index, which may be given by name."""
        name = self.operator._schema.arguments[place].name
        return kwargs[name] if name in kwargs else args[place]


@dataclass
class Call:
    """One call of a kernel: its device, and the CPU tensors over the memory of its arguments."""

    name: str
    found_device: torch.device | None = None
    aliases: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    hosts: list[torch.Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Device of the arguments, or the current device if no argument has one."""
        return self.found_device or torch.device("cuda", torch.cuda.current_device())

    def lower(self, value: Any) -> Any:
        """Return an argument for the CPU operator."""
        if isinstance(value, torch.Tensor):
            return self._lower_tensor(value)
        if isinstance(value, torch.device):
            self.found_device = self.found_device or value
            return torch.device("cpu")
        if isinstance(value, list | tuple):
            return [self.lower(one) for one in value]
        return value

    def _lower_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cuda":
            if tensor.dim():  # a scalar of the host may join any device
                self.hosts.append(tensor)
            return tensor
        self.found_device = self.found_device or tensor.device
        if tensor.device != self.found_device:
            raise RuntimeError(f"aten::{self.name}: tensors on {self.found_device} and {tensor.device}")
        if id(tensor) not in self.aliases:
            self.aliases[id(tensor)] = (tensor, alias(tensor))
        return self.aliases[id(tensor)][1]

    def check_devices(self) -> None:
        """Raise RuntimeError if tensors of the host and of a device are mixed."""
        if self.hosts and self.aliases and self.name not in MIXED:
            shapes = [tuple(one.shape) for one in self.hosts]
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {self.device} and "
                f"cpu! (aten::{self.name}, shapes on the CPU {shapes})"
            )

    def copy_back_resized(self) -> None:
        """Resize the arguments that the operator has resized."""
        for tensor, lowered in self.aliases.values():
            if tensor.shape != lowered.shape:
                tensor.resize_(lowered.shape)
                alias(tensor).copy_(lowered)

    def upload(self, value: Any) -> Any:
        """Return new tensors of a result on the device."""
        if isinstance(value, torch.Tensor):
            return upload(value, self.device)
        if isinstance(value, list | tuple):
            return [self.upload(one) for one in value]
        return value


def settle_current_stream() -> None:
    """Wait for the current stream, as the kernel that is computed now would. The default stream is always settled."""
    stream_id, device_index, device_type = torch._C._cuda_getCurrentStream(torch._C._cuda_getDevice())
    if stream_id:
        stream = torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        trace.runtime().ghost_settle(ctypes.c_void_p(stream.cuda_stream))


def _copy_waits(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> bool:
    """Return whether the host waits for a copy: if it is blocking, or if the memory of the host is pageable."""
    if target.is_cuda == source.is_cuda or not target.numel():
        return False
    return not (non_blocking and (source if target.is_cuda else target).is_pinned())


def _read_scalar(self: torch.Tensor) -> Any:
    settle_current_stream()
    trace.note_wait()
    return alias(self).item()


def generator_of(generator: torch.Generator | None, device: torch.device) -> torch.Generator:
    """Return a CPU generator for one call, seeded by the state of the device's generator, which moves on."""
    if generator is None:
        generator = torch.cuda.default_generators[device.index or 0]
    if generator.device.type != "cuda":
        raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + 4)
    return torch.Generator().manual_seed((seed * 1000003 + offset * 7919 + 1) % (1 << 62))


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _argument_of(result: Any, arguments: Sequence[Any]) -> int | None:
    names = result.alias_info.before_set
    return next((i for i, one in enumerate(arguments) if _is_written(one) and one.alias_info.before_set & names), None)


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in HALF:
        return value.float()
    return [_widened(one) for one in value] if isinstance(value, list) else value


def _narrowed(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype == torch.float32 else value
    return type(value)(_narrowed(one, dtype) for one in value) if isinstance(value, tuple | list) else value


# ---- operators that the CPU lacks


def _rms_norm_backward(
    grad_out: torch.Tensor,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of input [..., n] and weight [n] of ``torch.rms_norm``."""
    gradient, x, scale = (alias(one).float() for one in (grad_out, input, rstd))
    num_dims = len(normalized_shape)
    normalized = x * scale.view(*x.shape[: x.dim() - num_dims], *[1] * num_dims)
    weighted = gradient if weight is None else gradient * alias(weight).float()
    mean = (weighted * normalized).mean(tuple(range(-num_dims, 0)), keepdim=True)
    of_input = scale.view(*x.shape[: x.dim() - num_dims], *[1] * num_dims) * (weighted - normalized * mean)
    of_weight = (gradient * normalized).flatten(0, -num_dims - 1).sum(0)
    return (
        upload(of_input.to(input.dtype), input.device) if output_mask[0] else None,
        upload(of_weight.to(weight.dtype), input.device) if output_mask[1] and weight is not None else None,
    )


def _product(self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, beta: float, alpha: float) -> torch.Tensor:
    return beta * alias(self).float() + alpha * (alias(mat1).float() @ alias(mat2).float())


def _addmm_dtype(self: Any, mat1: Any, mat2: Any, out_dtype: Any, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    """Return ``beta * self + alpha * mat1 @ mat2`` in a type, shapes [m, n], [m, k] and [k, n]."""
    return upload(_product(self, mat1, mat2, beta, alpha).to(out_dtype), self.device)


def _bmm_dtype(self: Any, mat2: Any, out_dtype: Any) -> torch.Tensor:
    """Return the products of [n, m, k] and [n, k, columns] in float32, without rounding factors or sums."""
    if out_dtype is not torch.float32 or self.dtype not in HALF or mat2.dtype != self.dtype:
        raise RuntimeError("out_dtype must be float32, for factors of 16 bits")
    return upload(alias(self).float() @ alias(mat2).float(), self.device)


def _addmm_dtype_out(
    self: Any, mat1: Any, mat2: Any, out_dtype: Any, *, beta: Any = 1, alpha: Any = 1, out: Any
) -> torch.Tensor:
    if self.dtype not in (out_dtype, mat1.dtype) or out.dtype != out_dtype:
        raise RuntimeError("out_dtype must be the same as self's or out's type")
    alias(out).copy_(_product(self, mat1, mat2, beta, alpha))
    return out


SPECIAL: dict[str, Callable[..., Any]] = {
    "_flash_attention_forward": flash.forward,
    "_flash_attention_backward": flash.backward,
    "_efficient_attention_forward": attention.efficient_forward,
    "_efficient_attention_backward": attention.efficient_backward,
    "_scaled_dot_product_cudnn_attention": attention.cudnn_forward,
    "_scaled_dot_product_cudnn_attention_backward": attention.cudnn_backward,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_local_scalar_dense": _read_scalar,
    "addmm.dtype": _addmm_dtype,
    "addmm.dtype_out": _addmm_dtype_out,
    "bmm.dtype": _bmm_dtype,
}
