"""Races on ghost GPUs: accesses to memory that no stream wait and no wait of the host puts in order.

Kernels of a ghost compute at once, so a missing wait changes no loss. The detector keeps vector clocks (Lamport 1978;
Fidge and Mattern 1988) of all streams and of the host, as torch's own CUDA sanitizer does, and in addition:

- Accesses are ranges of bytes, so that views of one block count as what they are.
- Page-locked memory counts: a copy in the background and code of the host that uses the same bytes are a race.
- Streams of NCCL count, from the events that ``ProcessGroupNCCL`` records.
- A block that is freed while another stream uses it, without ``record_stream``, must not be used again before.
"""

from __future__ import annotations

import concurrent.futures
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.cuda._gpu_trace as gpu_trace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = -1  # in the place of a stream
MAX_ACCESSES = 400  # remembered for a block
Clock = dict[int, int]
"""Number of the last operation of each stream that is known to have ended."""

# Operators that touch no bytes: they allocate, or make views.
NO_ACCESS = ("empty", "as_strided", "view", "detach", "set_", "_unsafe_view", "_reshape_alias", "resize_", "pin_memory")
_HIDDEN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "<")


@dataclass(frozen=True)
class Access:
    """Bytes ``start`` to ``end`` of memory that an operation of a stream reads or writes."""

    start: int
    end: int
    stream: int
    number: int
    is_write: bool
    place: str

    def overlaps(self, other: Access) -> bool:
        """Return whether both touch a byte."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        who = "the host" if self.stream == HOST else f"stream {self.stream}"
        return f"{'write' if self.is_write else 'read'} by {who} at {self.place}"


class RaceDetector(TorchDispatchMode):
    """Mode that checks every operator. ``races`` counts what it finds, by text."""

    def __init__(self) -> None:
        super().__init__()
        self.races: Counter[str] = Counter()
        self._number = 0
        self._clocks: dict[int, Clock] = defaultdict(dict)
        self._events: dict[int, Clock] = {}
        self._accesses: dict[int, list[Access]] = defaultdict(list)  # by the address of a block
        self._owner: dict[int, int] = {}  # stream that a block was made for
        self._recorded: dict[int, set[int]] = defaultdict(set)
        self._freed: list[tuple[Access, str]] = []
        self._nccl_stream: int | None = None
        self._nccl_number: int | None = None
        self._lock = threading.RLock()
        torch._C._activate_gpu_trace()
        gpu_trace.register_callback_for_event_record(self._record_event)
        gpu_trace.register_callback_for_event_wait(self._wait_event)
        gpu_trace.register_callback_for_event_synchronization(
            lambda event: self._tell_host(self._events.get(event, {}))
        )
        gpu_trace.register_callback_for_stream_synchronization(lambda stream: self._tell_host(self._clocks[stream]))
        gpu_trace.register_callback_for_device_synchronization(lambda *_: self._tell_host(*self._clocks.values()))
        gpu_trace.register_callback_for_memory_allocation(self._allocate)
        gpu_trace.register_callback_for_memory_deallocation(self._free)

    # ---- clocks

    def _record_event(self, event: int, stream: int) -> None:
        with self._lock:
            if self._nccl_number is not None and stream != torch.cuda.current_stream().cuda_stream:
                self._nccl_stream = stream
                self._clocks[stream][stream] = self._nccl_number
            self._events[event] = dict(self._clocks[stream])

    def _wait_event(self, event: int, stream: int) -> None:
        with self._lock:
            _join(self._clocks[stream], self._events.get(event, {}))

    def _tell_host(self, *clocks: Clock) -> None:
        """The host knows what has ended, and so does everything that it starts from now on."""
        with self._lock:
            for clock in list(clocks):
                _join(self._clocks[HOST], clock)
            for stream in list(self._clocks):
                _join(self._clocks[stream], self._clocks[HOST])

    def _is_before(self, earlier: Access, stream: int) -> bool:
        if earlier.stream == stream:
            return True
        if earlier.stream == HOST:  # the host starts all work, after what it did itself
            return True
        return self._clocks[stream].get(earlier.stream, -1) >= earlier.number

    # ---- blocks of the caching allocator

    def _allocate(self, address: int) -> None:
        with self._lock:
            self._accesses.pop(address, None)
            self._recorded.pop(address, None)
            self._owner[address] = torch.cuda.current_stream().cuda_stream

    def _free(self, address: int) -> None:
        with self._lock:
            owner = self._owner.get(address, 0)
            for access in self._accesses.pop(address, ()):
                known = access.stream in (owner, HOST) or access.stream in self._recorded[address]
                if not known and not self._is_before(access, owner):
                    self._freed.append((access, _place()))
            self._freed = self._freed[-2000:]

    def _check_reuse(self, access: Access) -> None:
        remaining = []
        for earlier, place in self._freed:
            if not earlier.overlaps(access):
                remaining.append((earlier, place))
            elif not self._is_before(earlier, access.stream):
                self.races[f"memory used again too early: {access}, after {earlier}, freed at {place}"] += 1
        self._freed = remaining

    # ---- accesses

    def _access(self, block: int, access: Access) -> None:
        if access.stream != HOST:
            self._check_reuse(access)
        kept = []
        for earlier in self._accesses[block]:
            if earlier.overlaps(access) and (earlier.is_write or access.is_write):
                if not self._is_before(earlier, access.stream):
                    self.races[f"{access}, after {earlier}"] += 1
                elif access.is_write and access.start <= earlier.start and earlier.end <= access.end:
                    continue  # later accesses are compared with this write
            same = (earlier.start, earlier.end, earlier.stream) == (access.start, access.end, access.stream)
            if not (same and not earlier.is_write and not access.is_write):
                kept.append(earlier)
        self._accesses[block] = [*kept, access][-MAX_ACCESSES:]

    def _access_all(self, tensors: Iterable[torch.Tensor], stream: int, is_write: bool, place: str) -> None:
        for tensor in tensors:
            if tensor.numel() and (tensor.is_cuda or tensor.is_pinned()):
                steps = zip(tensor.shape, tensor.stride(), strict=True)
                start = tensor.data_ptr()
                end = start + (sum((size - 1) * step for size, step in steps) + 1) * tensor.element_size()
                block = tensor.untyped_storage().data_ptr()
                self._access(block, Access(start, end, stream, self._number, is_write, place))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and check its accesses."""
        kwargs = kwargs or {}
        space, name = func._schema.name.split("::")
        if name == "record_stream":
            with self._lock:
                self._recorded[args[0].untyped_storage().data_ptr()].add(args[1].stream_id)
            return func(*args, **kwargs)
        if space == "c10d":
            return self._communicate(func, args, kwargs)
        result = func(*args, **kwargs)
        if name.startswith(NO_ACCESS):
            return result
        reads, writes = _reads_and_writes(func._schema, args, kwargs, result)
        with self._lock:
            self._number += 1
            on_device = any(tensor.is_cuda for tensor in (*reads, *writes))
            stream = torch.cuda.current_stream().cuda_stream if on_device else HOST
            self._clocks[stream][stream] = self._number
            place = f"{name} in {_place()}"
            self._access_all(reads, stream, False, place)
            self._access_all(writes, stream, True, place)
            if on_device and _waits(name, args, kwargs, (*reads, *writes)):
                self._tell_host(self._clocks[stream])
        return result

    def _communicate(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self._lock:
            self._number += 1
            self._nccl_number, self._nccl_stream = self._number, None
        try:
            result = func(*args, **kwargs)
        finally:
            with self._lock:
                number, self._nccl_number = self._nccl_number, None
        with self._lock:
            stream = torch.cuda.current_stream().cuda_stream if self._nccl_stream is None else self._nccl_stream
            self._clocks[stream][stream] = number or self._number
            name = func._schema.name
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            self._access_all(tensors, stream, name != "c10d::send", f"{name} in {_place()}")
        return result


def watch() -> RaceDetector:
    """Check all operators of this process from now on, in its thread pools too."""
    detector = RaceDetector()
    submit = concurrent.futures.ThreadPoolExecutor.submit

    def submit_watched(pool: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            with detector:
                return function(*args, **kwargs)

        return submit(pool, run, *args, **kwargs)

    concurrent.futures.ThreadPoolExecutor.submit = submit_watched  # type: ignore[method-assign]
    detector.__enter__()
    return detector


def _join(clock: Clock, other: Clock) -> None:
    for stream, number in other.items():
        if clock.get(stream, -1) < number:
            clock[stream] = number


def _reads_and_writes(
    schema: Any, args: Any, kwargs: Any, result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for index, argument in enumerate(schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        info = argument.alias_info
        if value is None or (info is not None and not info.is_write):  # the argument of a view
            continue
        (reads if info is None else writes).extend(one for one in tree_leaves(value) if isinstance(one, torch.Tensor))
    results = result if isinstance(result, tuple) else (result,)
    for one, value in zip(schema.returns, results, strict=False):
        if one.alias_info is None:
            writes += [made for made in tree_leaves(value) if isinstance(made, torch.Tensor)]
    return reads, writes


def _waits(name: str, args: Any, kwargs: Any, tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether the host waits for an operator: it reads a value, or copies in the foreground."""
    if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal"):
        return True
    hosts = [tensor for tensor in tensors if not tensor.is_cuda and tensor.dim()]
    if name not in ("copy_", "_to_copy") or not hosts:
        return False
    in_background = kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,))
    return not (in_background and hosts[0].is_pinned())


def _place() -> str:
    """Return the innermost two lines outside torch and these tests."""
    frame: Any = sys._getframe(1)
    found: list[str] = []
    while frame is not None and len(found) < 2:
        name = frame.f_code.co_filename
        if not name.startswith(_HIDDEN):
            found.append(f"{'/'.join(name.split('/')[-3:])}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found)
