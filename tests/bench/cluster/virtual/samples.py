"""Devices, models and programs for the tests of virtual time."""

from __future__ import annotations

from collections.abc import Sequence

from bytescale_ext.plan.cost.model_shape import ModelShape
from scripts.bench.cluster.virtual.events import Begin, End, Event, Message, Post, Programs, Step, Wait, Work
from scripts.bench.cluster.virtual.links import Links
from scripts.bench.cluster.virtual.replay import Replay, StepTimes
from scripts.bench.cluster.virtual.times import NO_HOST, DeviceTimes, HostTimes, ModelTimes

DEVICE = DeviceTimes("a device", "made up", 400e12, 0.0, 0.0, 600e12, 1e30, 300e9, 0.0, 0.0)
MODEL = ModelShape(32, 4096, 32, 8, 128, 11008, True, 32000)
RECORDED = ModelShape(1, 32, 2, 1, 16, 64, True, 384)
NODE_BYTES, NETWORK_BYTES = 300e9, 50e9
LINKS = Links(8, NODE_BYTES, NETWORK_BYTES)


def times_of(device: DeviceTimes = DEVICE, host: HostTimes = NO_HOST, repeats: int = 32) -> ModelTimes:
    """Return the times of a model whose recorded layers stand for ``repeats`` layers each."""
    shape = ModelShape(repeats, 4096, 32, 8, 128, 11008, True, 32000)
    return ModelTimes(shape, RECORDED, device, host, 32, num_replicas=64)


def step_of(
    *ranks: Sequence[Event], times: ModelTimes | None = None, links: Links = LINKS, num_steps: int = 1
) -> StepTimes:
    """Return the times of the last of some equal steps with these events on each rank."""
    programs = Programs([[Step(()), *events] * num_steps for events in ranks])
    return Replay(programs, times or times_of(), links).steps[-1]


def attention(tokens: int, is_backward: bool = False, keys: int = 0) -> Work:
    """Return a kernel: the triangle of a document, or a rectangle of other ``keys``."""
    return Work("attention", is_backward, tokens, keys or tokens, ((tokens, keys or tokens),), not keys)


def layer(tokens: int, is_backward: bool = False) -> list[Event]:
    """Return the events of a layer with one local document."""
    first, last = ("after", "before") if is_backward else ("before", "after")
    inside = [Work(first, is_backward, tokens), attention(tokens, is_backward), Work(last, is_backward, tokens)]
    return [Begin(is_backward), *inside, End()]


def exchange(ticket: int, peer_out: int, peer_in: int, numbers: int, kind: str = "keys") -> Post:
    """Return a batch that sends to one process and receives from another."""
    return Post(ticket, "group", kind, (Message(True, peer_out, numbers), Message(False, peer_in, numbers)))


def waits(*tickets: int) -> list[Event]:
    """Return the waits for tickets."""
    return [Wait(ticket) for ticket in tickets]
