"""Record the program of a rank while it trains: hooks of the bench around kernels, layers and messages.

The hooks change nothing that is computed. Only calls of the main thread between the first and the last step count.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from bytescale_ext.attention.kernels.table import Kernel
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.data.loading.step import StepBatch
from scripts.bench.cluster.virtual.events import (
    Begin,
    Collective,
    End,
    Event,
    HostWait,
    Message,
    Post,
    Step,
    Wait,
    Work,
)


class Recorder:
    """Events of this rank.

    Attributes:
        events: events so far.
        is_on: whether calls are recorded.
        kind: kind of the messages that follow.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_on = False
        self.kind = "stage"
        self._tickets = 0
        self._muted = 0

    def add(self, event: Event) -> None:
        """Add an event of the main thread."""
        if self.is_on and not self._muted and threading.current_thread() is threading.main_thread():
            self.events.append(event)

    def ticket(self) -> int:
        """Return a new ticket."""
        self._tickets += 1
        return self._tickets

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Record nothing inside."""
        self._muted += 1
        try:
            yield
        finally:
            self._muted -= 1

    @contextmanager
    def of_kind(self, kind: str) -> Iterator[None]:
        """Give messages a kind inside."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before


class _WaitRecorded:
    """A request whose first wait is recorded."""

    def __init__(self, work: Any, ticket: int, recorder: Recorder) -> None:
        self._work, self._ticket, self._recorder = work, ticket, recorder
        self._has_waited = False

    def wait(self, *args: object) -> object:
        """Wait for the request."""
        if not self._has_waited:
            self._has_waited = True
            self._recorder.add(Wait(self._ticket))
        return self._work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def record_kernel(kernel: Kernel, recorder: Recorder) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions of a kernel that also record their documents, and the join of a block of other ranks."""

    def note(block: AttentionBlock, is_backward: bool) -> None:
        documents = tuple(zip(block.cu_q.lengths, block.cu_k.lengths, strict=True))
        tokens, keys = block.cu_q.num_tokens, block.cu_k.num_tokens
        recorder.add(Work("attention", is_backward, tokens, keys, documents, block.causal))
        if not block.causal:
            recorder.add(Work("join", is_backward, tokens, keys))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Any:
        note(block, is_backward=False)
        return kernel.forward(q, k, v, block)

    def backward(dout: torch.Tensor, saved: Any, block: AttentionBlock) -> Any:
        note(block, is_backward=True)
        return kernel.backward(dout, saved, block)

    return forward, backward


def record_attention(owner: type, recorder: Recorder) -> None:
    """Record the linear parts of a layer around the attention of an autograd function ``owner``."""
    forward, backward = owner.forward, owner.backward  # type: ignore[attr-defined]

    def forward_recorded(ctx: Any, q: torch.Tensor, *args: Any) -> Any:
        recorder.add(Work("before", False, len(q)))
        out = forward(ctx, q, *args)
        recorder.add(Work("after", False, len(q)))
        return out

    def backward_recorded(ctx: Any, dout: torch.Tensor) -> Any:
        gradients = backward(ctx, dout)
        recorder.add(Work("before", True, len(dout)))
        recorder.add(End())
        return gradients

    owner.forward, owner.backward = staticmethod(forward_recorded), staticmethod(backward_recorded)  # type: ignore[attr-defined]


def record_layers(model: torch.nn.Module, layers: Sequence[torch.nn.Module], recorder: Recorder) -> None:
    """Record the begin and the end of each layer, and the output layer of the last stage."""

    def begin(module: torch.nn.Module, args: Any) -> None:
        recorder.add(Begin(False))

    def end(module: torch.nn.Module, args: Any, output: Any) -> None:
        recorder.add(End())
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            tokens = hidden.shape[0]
            hidden.register_hook(
                lambda _: (recorder.add(Begin(True)), recorder.add(Work("after", True, tokens)), None)[-1]
            )

    for layer in layers:
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)
    if getattr(model, "post_process", False):

        def head(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
            tokens = output.numel()
            recorder.add(Work("head", False, tokens))
            if output.requires_grad:
                output.register_hook(lambda _: recorder.add(Work("head", True, tokens)))

        model.register_forward_hook(head)


def record_messages(recorder: Recorder) -> None:
    """Record batches of messages, and small collectives."""
    original = dist.batch_isend_irecv

    @functools.wraps(original)
    def batch_isend_irecv(operations: list[Any]) -> list[Any]:
        works = original(operations)
        group = operations[0].group or dist.group.WORLD
        messages = tuple(Message(one.op in _SENDS, one.peer, one.tensor.numel()) for one in operations)
        ticket = recorder.ticket()
        recorder.add(Post(ticket, group.group_name, recorder.kind, messages))
        return [_WaitRecorded(works[0], ticket, recorder), *works[1:]] if works else works

    dist.batch_isend_irecv = batch_isend_irecv
    for name in ("all_reduce", "all_gather_object", "barrier", "broadcast", "all_gather", "all_gather_into_tensor"):
        setattr(dist, name, _small(getattr(dist, name), recorder))


_SENDS = (dist.isend,)


def _small(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Return a collective of a few numbers that is recorded: the stream that computes waits for it."""

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or next((one for one in args if isinstance(one, dist.ProcessGroup)), None)
        if group is None:
            group = dist.group.WORLD
        members = tuple(dist.get_process_group_ranks(group))
        if len(members) > 1:
            ticket = recorder.ticket()
            recorder.add(Collective(ticket, group.group_name, "small", members, 1))
            recorder.add(Wait(ticket))
            if original.__name__ == "barrier":
                recorder.add(HostWait())
        with recorder.muted():
            return original(*args, **kwargs)

    return collective


def record_gradients(owner: type, recorder: Recorder) -> None:
    """Record the reductions and gathers of Megatron's groups of buckets."""
    _record_buckets(owner, ("start_grad_sync", "finish_grad_sync"), "reduce", recorder)
    _record_buckets(owner, ("start_param_sync", "finish_param_sync"), "gather", recorder)


def _record_buckets(owner: type, names: tuple[str, str], kind: str, recorder: Recorder) -> None:
    start, finish = (getattr(owner, name) for name in names)
    handle = "grad_reduce_handle" if kind == "reduce" else "param_gather_handle"
    tickets: dict[int, int] = {}

    def wait(group: Any) -> None:
        if id(group) in tickets:
            recorder.add(Wait(tickets.pop(id(group))))

    def started(group: Any, *args: Any, **kwargs: Any) -> None:
        is_running = getattr(group, handle) is not None
        with recorder.muted():
            start(group, *args, **kwargs)
        if is_running:  # the call has only waited, or done nothing
            if getattr(group, handle) is None:
                wait(group)
            return
        processes = group.intra_distributed_optimizer_instance_group
        numbers = sum(bucket.grad_data.numel() for bucket in group.buckets)
        tickets[id(group)] = recorder.ticket()
        members = tuple(dist.get_process_group_ranks(processes))
        recorder.add(Collective(tickets[id(group)], processes.group_name, kind, members, numbers))
        if getattr(group, handle) is None:
            wait(group)

    def finished(group: Any, *args: Any, **kwargs: Any) -> None:
        finish(group, *args, **kwargs)
        wait(group)

    setattr(owner, names[0], started)
    setattr(owner, names[1], finished)


def record_travel(recorder: Recorder) -> None:
    """Give the messages of a ring their kind."""
    from bytescale_ext.attention.travel import TravellingKeys, TravellingSums

    for owner, names, kind in ((TravellingKeys, ("post",), "keys"), (TravellingSums, ("post", "post_home"), "sums")):
        for name in names:
            setattr(owner, name, _of_kind(getattr(owner, name), kind, recorder))


def _of_kind(original: Callable[..., Any], kind: str, recorder: Recorder) -> Callable[..., Any]:
    @functools.wraps(original)
    def post(*args: Any) -> Any:
        with recorder.of_kind(kind):
            return original(*args)

    return post


def record_steps(
    training: Any, recorder: Recorder, num_parameters: Callable[[], int], batch: Callable[[], StepBatch | None]
) -> None:
    """Record the begin of each step and its optimizer in Megatron's module ``training``.

    ``batch``: returns the documents of the step that has run.
    """
    train_step = training.train_step

    @functools.wraps(train_step)
    def step(forward: Any, iterator: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.is_on, place = True, len(recorder.events)
        recorder.add(Step(()))
        update = optimizer.step

        def update_recorded() -> Any:
            result = update()  # reads the norm of the gradients
            recorder.add(HostWait())
            recorder.add(Work("optimizer", False, num_parameters()))
            return result

        optimizer.step = update_recorded
        try:
            result = train_step(forward, iterator, model, optimizer, *args, **kwargs)
        finally:
            optimizer.step = update
        recorder.add(HostWait())  # the log reads the loss
        finished = batch()
        assert finished is not None
        recorder.events[place] = Step(tuple(finished.lengths))
        return result

    training.train_step = step
