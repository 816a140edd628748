"""Trainings on ghost GPUs: losses, the order of NCCL calls, and waits of the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.once import once
from tests.e2e.training import step_losses
from tests.ghost.cases import CASES, STEPS, Case
from tests.ghost.devices import needs_ghosts
from tests.ghost.order import Event, HostWait, Init, Step, read_traces, stuck_runs
from tests.ghost.training import train_on_cpus, train_on_ghosts
from tests.sample import sampled

END_OF_STEP = "once a step, after the optimizer: losses and times of all ranks for the log"
MAX_WAITS_AT_THE_END = 12  # of the host in a step, whatever the number of layers and micro-batches
# Lines of ours that make the host wait for the device within a step, and why. Megatron's own are not listed: its check
# for NaN in each micro-batch, the norm of the gradients, and its log.
WAITS = {
    "megatron/bytescale/training/training.py:_gather": END_OF_STEP,
    "megatron/bytescale/training/training.py:mean_losses": END_OF_STEP,
    "megatron/bytescale/training/training.py:<genexpr>": END_OF_STEP,
    "megatron/bytescale/training/training.py:progress": END_OF_STEP,
    "bytescale_ext/measure/metrics.py:work_seconds": END_OF_STEP,
    "megatron/bytescale/features/experts/loads.py:__call__": END_OF_STEP,
    "megatron/bytescale/features/experts/loads.py:step_loads": END_OF_STEP,
    "bytescale_ext/parallel/agreement.py:compare_plans": "before one step in 100: do all ranks have the same plan?",
    "megatron/bytescale/core/models/common/embeddings/host_table.py:end_step": "gradients of a table in host memory",
    "megatron/bytescale/core/distributed/param_and_grad_buffer.py:scale_gradients": "the divisor of host gradients",
    "bytescale_ext/states/collectives.py:reduce_scatter": "host gradients, reduced after the backward pass",
    "bytescale_ext/states/collectives.py:_contribution": "host gradients, before they are reduced",
    "bytescale_ext/states/node_memory.py:barrier": "host memory of a node: before it is zeroed, reduced and updated",
    "bytescale_ext/states/scaling.py:on": "factors of rows of parameters in host memory, after the update",
    "bytescale_ext/states/collectives.py:gather": "host parameters, gathered after the update",
}

pytestmark = [pytest.mark.ranks, needs_ghosts]


@dataclass(frozen=True)
class GhostRun:
    """A training on ghost GPUs: its losses, what each rank told its device, and the devices that each rank used."""

    losses: list[float]
    traces: dict[int, list[Event]]
    devices: dict[int, list[int]]


def run_on_ghosts(case: Case, corpus: Path) -> GhostRun:
    """Train on ghost GPUs, once in a test session."""

    def train(folder: Path) -> GhostRun:
        train_on_ghosts(case.num_ranks, *case.argv(corpus, folder / "logs"), traces=folder)
        return GhostRun(step_losses(folder / "logs"), read_traces(folder), read_devices(folder))

    return once(train, "ghost", case)


def read_devices(folder: Path) -> dict[int, list[int]]:
    """Return the devices in the last lines of each rank's trace."""
    lines = {int(file.stem.removeprefix("rank")): file.read_text().splitlines() for file in folder.glob("rank*.trace")}
    return {rank: [int(line.split()[1]) for line in lines[rank] if line.startswith("DEVICE ")] for rank in lines}


each_case = pytest.mark.parametrize("case", sampled(CASES, [case for case in CASES if case.is_quick]), ids=str)


@each_case
def test_losses_equal_cpu_ranks(case: Case, corpus: Path, tmp_path: Path) -> None:
    found = run_on_ghosts(case, corpus)
    train_on_cpus(case.num_ranks, *case.argv(corpus, tmp_path))
    assert found.losses == pytest.approx(step_losses(tmp_path), rel=case.tolerance)
    assert len(found.losses) == STEPS


@each_case
def test_each_rank_uses_its_own_device_only(case: Case, corpus: Path) -> None:
    """A thread, and a process before its device is chosen, use device 0, where they would take memory from rank 0."""
    assert run_on_ghosts(case, corpus).devices == {rank: [rank] for rank in range(case.num_ranks)}


@each_case
def test_no_communicator_is_created_in_a_step(case: Case, corpus: Path) -> None:
    """Creation waits for all members, which may be in different passes."""
    for events in run_on_ghosts(case, corpus).traces.values():
        late = [event for event in events[events.index(Step(1)) :] if isinstance(event, Init)]
        assert late == []


@each_case
def test_no_host_can_make_a_run_hang(case: Case, corpus: Path) -> None:
    assert stuck_runs(run_on_ghosts(case, corpus).traces, STEPS) == []


@each_case
def test_only_known_lines_of_ours_wait_in_a_step(case: Case, corpus: Path) -> None:
    for events in run_on_ghosts(case, corpus).traces.values():
        last = events[events.index(Step(STEPS)) :]
        waits = Counter(event.place for event in last if isinstance(event, HostWait))
        ours = {place for place in waits if place.startswith(("bytescale_ext/", "megatron/bytescale/"))}
        assert ours <= WAITS.keys(), ours - WAITS.keys()
        per_step = sum(number for place, number in waits.items() if WAITS.get(place) == END_OF_STEP)
        assert per_step <= MAX_WAITS_AT_THE_END, waits
