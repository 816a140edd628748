"""Weights of replicas are fetched a layer ahead, once in a step, from weights that are whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.plan.experts.placement import PlacementPlan
from megatron.bytescale.core.transformer.moe.placed_layer import PlacedMoELayer, Placements
from megatron.bytescale.core.transformer.moe.slot_experts import SlotExperts
from megatron.bytescale.features.experts.build import FetchAhead, linked_layers, wait_for_weights
from tests.harness import run_ranks

PLACEMENTS = Placements(PlacementPlan.static(4, 2, 3))


class Experts(SlotExperts):
    """Notes its transfers."""

    def __init__(self, name: str, calls: list[str]) -> None:
        torch.nn.Module.__init__(self)
        self.name, self.calls = name, calls
        self.weight = torch.nn.Parameter(torch.ones(1))

    def fetch(self) -> None:
        if self.fetched is None:
            assert self.before_reading is not None
            self.before_reading()
            self.calls.append(f"fetch {self.name}")
            self.fetched = "on its way"  # type: ignore[assignment]


class Layer(PlacedMoELayer):
    """Follows no plan."""

    def __init__(self, name: str, calls: list[str]) -> None:
        torch.nn.Module.__init__(self)
        self.experts = Experts(name, calls)

    def fetch(self) -> None:
        self.experts.fetch()

    def forward(self, *args: Any) -> None:
        self.fetch()
        if self.fetch_next is not None:
            self.fetch_next()
        self.experts.calls.append(f"run {self.experts.name}")


class Chunk(torch.nn.Module):
    """A model chunk of layers in slots, as DDP wraps it."""

    def __init__(self, names: str, calls: list[str]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(1, 1), *(Layer(name, calls) for name in names)])

    def forward(self, *args: Any) -> None:
        for layer in self.layers[1:]:
            layer()


def run(ahead: FetchAhead, chunk: Chunk) -> None:
    ahead.wrap(lambda data, model: model())(None, chunk)


def test_each_layer_is_fetched_before_the_one_in_front_of_it_runs() -> None:
    calls: list[str] = []
    ahead, chunk = FetchAhead(PLACEMENTS), Chunk("abc", calls)
    run(ahead, chunk)
    first = ["fetch a", "fetch b", "run a", "fetch c", "run b", "run c"]
    assert calls == first
    again = ["run a", "run b", "run c"]
    run(ahead, chunk)
    assert calls == [*first, *again], "a second micro-batch fetches nothing"
    ahead.forget()
    run(ahead, chunk)
    assert calls == [*first, *again, *first]


def test_each_chunk_has_its_own_layers() -> None:
    calls: list[str] = []
    ahead, chunks = FetchAhead(PLACEMENTS), [Chunk("ab", calls), Chunk("c", calls), Chunk("", calls)]
    for chunk in chunks:
        run(ahead, chunk)
    assert calls == ["fetch a", "fetch b", "run a", "run b", "fetch c", "run c"]
    calls.clear()
    ahead.forget()
    run(ahead, chunks[1])
    assert calls == ["fetch c", "run c"]


def test_an_evaluation_fetches_anew_and_so_does_the_training_after_it() -> None:
    calls: list[str] = []
    ahead, chunk = FetchAhead(PLACEMENTS), Chunk("a", calls)
    for mode in (True, True, False, False, True):
        run(ahead, chunk.train(mode))
    assert calls == ["fetch a", "run a", "run a", "fetch a", "run a", "run a", "fetch a", "run a"]


def test_layers_hold_each_other_without_being_parts_of_each_other() -> None:
    chunk = Chunk("abc", [])
    names = [name for name, _ in chunk.named_parameters()]
    assert len(linked_layers(chunk)) == 3
    assert [name for name, _ in chunk.named_parameters()] == names


@pytest.mark.parametrize(("handles", "waits"), [({}, False), ({"module": "handle"}, True)])
def test_weights_are_read_after_they_are_gathered(handles: dict[str, str], waits: bool) -> None:
    """Where Megatron's hooks are in place: not in an evaluation."""
    waited: list[torch.nn.Module] = []
    chunk = SimpleNamespace(remove_forward_pre_hook_handles=handles, _make_forward_pre_hook=lambda: waited.append)
    expert = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    wait_for_weights(chunk, expert)
    assert waited == ([expert, expert[0], expert[1]] if waits else [])


def test_a_model_that_gathers_nothing_is_not_waited_for() -> None:
    wait_for_weights(Chunk("a", []), torch.nn.Linear(1, 1))


def joined(rank: int, world: int) -> tuple[list[int], bool]:
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    placements = Placements(PlacementPlan.static(4, 2, 3))
    chunks = [torch.nn.Linear(1, 1)]
    assert FetchAhead(placements).join(chunks, timeout_minutes=1.0) is chunks
    group = placements.weights_group
    assert group is not None
    total = torch.tensor([rank])
    torch.distributed.all_reduce(total, group=group)
    is_own = group is not parallel_state.get_expert_model_parallel_group()
    return [*torch.distributed.get_process_group_ranks(group), int(total)], is_own


@pytest.mark.ranks
def test_weights_have_a_communicator_of_their_own() -> None:
    assert run_ranks(joined, 4) == [([0, 1, 1], True)] * 2 + [([2, 3, 5], True)] * 2
