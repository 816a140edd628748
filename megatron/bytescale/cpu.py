"""Stand-ins for the ``torch.cuda`` calls that Megatron makes, so that it trains on CPU with gloo.

They are installed only without a GPU or with ``--cpu``, and a log line reports them. Megatron's arithmetic does not
change. Streams and events do nothing, because a CPU has one queue. The device "cuda" means "cpu", and CUDA's random
state is the state of the CPU's generator. Every replaced function is a row of ``_torch_rows``, or of feature "cpu" in
``patches.py``. ``uninstall`` restores the original functions.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import torch

from megatron.bytescale.registry import Installation


def wanted(argv: Sequence[str]) -> bool:
    """Return whether this process runs on CPU: its command line has ``--cpu``, or it sees no GPU."""
    return "--cpu" in argv or installed() or not torch.cuda.is_available()


def installed() -> bool:
    """Return whether the stand-ins are installed."""
    return torch.cuda.Stream is InertStream


def _as_cpu(value: object) -> object:
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class _DeviceType(type):
    """Metaclass of ``_Device``, the substitute for ``torch.device``, which has no subclasses; instances are torch's."""

    def __call__(cls, device: object, *index: int, **kwargs: object) -> torch.device:
        return _DEVICE(_as_cpu(device), *index, **kwargs)  # type: ignore[call-overload]

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, _DEVICE)


class _Works:
    """Several messages that run as one."""

    def __init__(self, works: list[torch.distributed.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        """Wait for all messages."""
        for work in self.works:
            work.wait()


Work = torch.distributed.Work | _Works | None
"""Result of a collective: a handle if it is asynchronous, else None."""
Group = torch.distributed.ProcessGroup | None
Replacement = tuple[type | ModuleType, str, object]
"""An owner, an attribute name, and the attribute's value."""

_DEVICE = torch.device
_Device = _DeviceType("device", (), {"__module__": "torch", "__doc__": '"cuda" means "cpu".'})
# All torch functions that create tensors and take ``device``. A ``TorchFunctionMode`` would slow every torch call.
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros", "zeros_like",
)  # fmt: skip
_NEW_TENSORS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def _on_cpu[Made](original: Callable[..., Made]) -> Callable[..., Made]:
    """Return a function that creates tensors, with ``device="cuda"`` replaced by ``"cpu"``."""

    @functools.wraps(original)
    def make(*args: object, **kwargs: object) -> Made:
        if "device" in kwargs:
            kwargs["device"] = _as_cpu(kwargs["device"])
        return original(*args, **kwargs)

    return make


def _to_cpu(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return ``Tensor.to`` with device "cuda" replaced by "cpu" in all arguments; the first may be a device."""

    @functools.wraps(original)
    def to(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if args:
            args = (_as_cpu(args[0]), *args[1:])
        elif "device" in kwargs:
            kwargs["device"] = _as_cpu(kwargs["device"])
        return original(tensor, *args, **kwargs)

    return to


class InertStream:
    """The interface of a CUDA stream on CPU, where all work is already complete."""

    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: InertEvent | None = None) -> InertEvent:
        return event or InertEvent()


class InertEvent:
    """The interface of a CUDA event on CPU, where an event is complete when it is recorded."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: object) -> float:
        return 0.0


class _InertDevice(contextlib.AbstractContextManager[None]):
    """``torch.cuda.device(...)`` as a context that does nothing."""

    def __init__(self, device: object = None) -> None:
        pass

    def __exit__(self, *exc: object) -> None:
        pass


_PROPERTIES = SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=0, gcnArchName="")
_MEMORY_STATS = {
    "allocated_bytes.all.current": 0,
    "allocated_bytes.all.peak": 0,
    "reserved_bytes.all.current": 0,
    "reserved_bytes.all.peak": 0,
    "allocation.all.current": 0,
    "num_alloc_retries": 0,
}


@contextlib.contextmanager
def _inert_stream_context(stream: object) -> Iterator[None]:
    yield


def _returns[Value](value: Value) -> Callable[..., Value]:
    """Return a new function that returns ``value``; it must be new, because torch's tracer refuses shared functions."""

    def stand_in(*args: object, **kwargs: object) -> Value:
        return value

    return stand_in


def _not_compiled(model: object = None, **options: object) -> object:
    """Replace ``torch.compile``, as function or decorator, without compiling."""
    return model if model is not None else lambda function: function


def _tensor_to_cuda(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    return tensor


def _module_to_cuda(module: torch.nn.Module, *args: object, **kwargs: object) -> torch.nn.Module:
    return module


def _cuda_type_name(
    original: Callable[..., str | torch.Tensor],
) -> Callable[..., str | torch.Tensor]:
    """Return ``Tensor.type`` with the CUDA names that Megatron's optimizers compare, such as torch.cuda.FloatTensor."""

    def type_name(
        tensor: torch.Tensor, dtype: str | torch.dtype | None = None, *args: object, **kwargs: object
    ) -> str | torch.Tensor:
        if dtype is None:
            name = str(original(tensor))
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        return original(tensor, dtype.replace("torch.cuda.", "torch.") if isinstance(dtype, str) else dtype)

    return type_name


def _split_sizes_as_lists(original: Callable[..., Work]) -> Callable[..., Work]:
    """Return ``all_to_all_single`` that also accepts sizes as tensors, which Megatron passes but gloo refuses."""

    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: torch.Tensor | list[int] | None = None,
        input_split_sizes: torch.Tensor | list[int] | None = None,
        *args: object,
        **kwargs: object,
    ) -> Work:
        sizes = (
            sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
            for sizes in (output_split_sizes, input_split_sizes)
        )
        return original(output, input, *sizes, *args, **kwargs)

    return all_to_all_single


def _gathers_uneven(original: Callable[..., Work]) -> Callable[..., Work]:
    """Return ``all_gather`` for unequal shapes, which gloo refuses; expert ranks have different numbers of tokens."""

    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Group = None, async_op: bool = False
    ) -> Work:
        if len({part.shape for part in tensor_list}) == 1:
            return original(tensor_list, tensor, group, async_op)
        tensor_list[torch.distributed.get_rank(group)].copy_(tensor)
        works = [
            torch.distributed.broadcast(part, group=group, group_src=rank, async_op=async_op)
            for rank, part in enumerate(tensor_list)
        ]
        return _Works(works) if async_op else None

    return all_gather


def _scatters_uneven(original: Callable[..., Work]) -> Callable[..., Work]:
    """Return ``reduce_scatter`` for unequal shapes."""

    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: torch.distributed.ReduceOp.RedOpType = torch.distributed.ReduceOp.SUM,
        group: Group = None,
        async_op: bool = False,
    ) -> Work:
        if len({part.shape for part in input_list}) == 1:
            return original(output, input_list, op, group, async_op)
        assert not async_op, f"{async_op=}"
        parts = [part.clone() for part in input_list]
        for rank, part in enumerate(parts):
            torch.distributed.reduce(part, group=group, group_dst=rank, op=op)
        output.copy_(parts[torch.distributed.get_rank(group)])
        return None

    return reduce_scatter


def _torch_rows() -> list[Replacement]:
    """Return (owner, attribute, replacement) of every replaced torch call."""
    cuda = torch.cuda
    constant: dict[str, object] = {
        "is_available": lambda: True,
        "is_initialized": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: "cpu",
        "current_stream": lambda device=None: InertStream(),
        "default_stream": lambda device=None: InertStream(),
        "get_device_properties": lambda device=None: _PROPERTIES,
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_name": lambda device=None: "cpu",
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "mem_get_info": lambda device=None: (0, 0),
        "memory_stats": lambda device=None: dict(_MEMORY_STATS),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
        "Stream": InertStream,
        "Event": InertEvent,
        "stream": _inert_stream_context,
        "device": _InertDevice,
    }
    rows: list[Replacement] = [(cuda, name, value) for name, value in constant.items()]
    inert = ("set_device", "set_stream", "synchronize", "empty_cache", "reset_peak_memory_stats", "_lazy_init",
             "init", "ipc_collect")  # fmt: skip
    rows += [(cuda, name, _returns(None)) for name in inert]
    zero = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "device_memory_used")
    rows += [(cuda, name, _returns(0)) for name in zero]
    rows += [(cuda.nvtx, name, _returns(None)) for name in ("range_push", "range_pop", "mark")]
    rows += [
        (cuda, "default_generators", (torch.default_generator,)),
        (torch, "compile", _not_compiled),  # Megatron compiles its fusions for CUDA
        (torch, "device", _Device),
        *((torch, name, _on_cpu(getattr(torch, name))) for name in _FACTORIES),
        *((torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name))) for name in _NEW_TENSORS),
        (torch.Tensor, "to", _to_cpu(torch.Tensor.to)),
        (torch.accelerator, "is_available", lambda: False),
        (torch.Tensor, "cuda", _tensor_to_cuda),
        (torch.Tensor, "record_stream", _returns(None)),
        (torch.Tensor, "pin_memory", lambda tensor, device=None: tensor),
        (torch.Tensor, "type", _cuda_type_name(torch.Tensor.type)),
        (torch.nn.Module, "cuda", _module_to_cuda),
        (torch.distributed, "all_to_all_single", _split_sizes_as_lists(torch.distributed.all_to_all_single)),
        (torch.distributed, "all_gather", _gathers_uneven(torch.distributed.all_gather)),
        (torch.distributed, "reduce_scatter", _scatters_uneven(torch.distributed.reduce_scatter)),
    ]
    return rows


_INHERITED = object()  # the owner inherited the attribute


@dataclass
class CpuStandIns:
    """The installed stand-ins and the originals that they replace."""

    originals: list[Replacement] = field(default_factory=list)
    megatron: Installation = field(default_factory=Installation)

    def install_torch(self) -> None:
        """Replace the torch calls. Call it before Megatron is imported, because Megatron binds some of them."""
        for owner, name, value in _torch_rows():
            self.originals.append((owner, name, owner.__dict__.get(name, _INHERITED)))
            setattr(owner, name, value)

    def install_megatron(self) -> None:
        """Replace the Megatron functions that use CUDA in other ways. Raises ValueError; see ``Installation``."""
        from megatron.bytescale.patches import CPU, rows_of

        try:
            self.megatron.install(rows_of(CPU), None)
        except ValueError:
            self.uninstall()
            raise

    def uninstall(self) -> None:
        """Restore all originals, in reverse order."""
        self.megatron.uninstall()
        while self.originals:
            owner, name, value = self.originals.pop()
            if value is _INHERITED:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def install_if_wanted(argv: Sequence[str]) -> CpuStandIns | None:
    """Install all stand-ins if this process runs on CPU. Call it before Megatron is imported."""
    if not wanted(argv):
        return None
    stand_ins = CpuStandIns()
    if not installed():
        stand_ins.install_torch()
        stand_ins.install_megatron()
    return stand_ins
