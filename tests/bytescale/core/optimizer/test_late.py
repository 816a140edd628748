"""Chunks of a model wait for late updates where Megatron is about to save or to evaluate."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.states.updates.lock_free import LockFreeAdam
from megatron.bytescale.core.optimizer.late import LateUpdates, flush_first
from megatron.bytescale.core.optimizer.optimizer import page_parts
from tests.bytescale.core.optimizer.test_optimizer import AMPLE, float16_part


class Chunk(torch.nn.Module):
    """What a DDP module of Megatron's is asked for."""

    def __init__(self, events: list[str], shares: bool) -> None:
        super().__init__()
        self.events, self.ddp_config = events, SimpleNamespace(use_distributed_optimizer=shares)

    def start_param_sync(self, force_sync: bool = False) -> None:
        assert force_sync
        self.events.append("gather")

    def free_overlap_buffers(self) -> None:
        self.events.append("free")


class Updates:
    """Updates that note when they are taken."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def flush(self) -> None:
        self.events.append("flush")


@pytest.mark.parametrize("shares", [True, False])
def test_chunks_flush_before_they_are_saved_or_evaluated(shares: bool) -> None:
    events: list[str] = []
    chunks: list[Any] = [Chunk(events, shares), Chunk(events, shares)]
    late: Any = Updates(events)
    flush_first(chunks, late)
    gathers = ["gather"] if shares else []
    chunks[0].train()
    assert chunks[0].training
    assert events == []
    chunks[1].eval()
    assert not chunks[1].training
    assert events == ["flush", *gathers]
    events.clear()
    chunks[0].free_overlap_buffers()
    assert events == ["flush", *gathers, "free"]
    assert isinstance(chunks[0], Chunk)


def test_updates_of_all_parts() -> None:
    parts, exact = [float16_part(), float16_part()], float16_part()
    page_parts(parts, replace(AMPLE, update_steps=1), on_cuda=False)
    page_parts([exact], AMPLE, on_cuda=False)
    assert type(exact.paged_adam) is not LockFreeAdam
    late = LateUpdates([part.paged_adam for part in parts])
    before = [one.clone() for group in parts[0].float16_groups for one in group]
    for part in (*parts, exact):
        part.prepare_grads()
        part.step_with_ready_grads()
    found = [[one for group in part.float16_groups for one in group] for part in (*parts, exact)]
    assert late.missing == 1
    assert all(map(torch.equal, found[0], before))
    late.flush()
    assert late.missing == 0
    assert all(map(torch.equal, found[0], found[2]))
    assert all(map(torch.equal, found[1], found[2]))
    assert late.wait_seconds == sum(part.paged_adam.wait_seconds for part in parts)


def test_a_rank_without_parameters_lacks_nothing() -> None:
    late = LateUpdates([])
    late.flush()
    assert (late.missing, late.wait_seconds) == (0, 0.0)
