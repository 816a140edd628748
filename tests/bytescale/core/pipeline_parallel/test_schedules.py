"""Megatron's schedules with a fake model and fake communication: their actions, and freedom from deadlocks.

A stage's trace contains the actions of the installed schedule: forward and backward passes, posts of transfers, and
waits for transfers. The traces of all stages of several pipelines are replayed together with the strictest rules. A
send completes only when its receiver has posted the receive, and ranks that share a micro-batch run it at the same
time.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bytescale_ext.plan.schedule.actions import Action, SliceSchedule, seq1f1b_schedule
from bytescale_ext.plan.schedule.messages import received_actions
from bytescale_ext.plan.step.placed import PlacedRanks, micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from tests.harness import run_ranks

Trace = list[tuple[Any, ...]]


@dataclass(frozen=True)
class Pipeline:
    """Settings of Megatron: stages, virtual stages, their group, and the mode of communication."""

    num_stages: int
    num_chunks: int = 1
    group_size: int | None = None
    overlap: bool = False
    flush: bool = False

    @property
    def multiple(self) -> int:
        return (self.group_size or self.num_stages) if self.num_chunks > 1 else 1


PIPELINES = (
    Pipeline(2),
    Pipeline(4),
    Pipeline(2, 2, overlap=True),
    Pipeline(2, 2, overlap=True, flush=True),
    Pipeline(3, 2),
    Pipeline(4, 2, overlap=True),
    Pipeline(4, 3, overlap=True, flush=True),
    Pipeline(3, 2, group_size=5, overlap=True),
    Pipeline(4, 2, group_size=4),
)


def trace_stages(rank: int, world: int, cases: Sequence[tuple[Pipeline, int, int, bool]]) -> list[Trace]:
    """Run Megatron's schedule once for each (pipeline, micro-batches, stage, forward only)."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    return [_trace(*case) for case in cases]


def _config(pipeline: Pipeline) -> SimpleNamespace:
    """Return the fields of a model's configuration that Megatron's schedules read."""
    num_chunks = pipeline.num_chunks
    return SimpleNamespace(
        timers=None, no_sync_func=None, grad_sync_func=None, param_sync_func=None, finalize_model_grads_func=None,
        hidden_size=1, sequence_parallel=False, variable_seq_lengths=False, overlap_p2p_comm=pipeline.overlap,
        batch_p2p_comm=not pipeline.overlap, overlap_p2p_comm_warmup_flush=pipeline.flush,
        microbatch_group_size_per_vp_stage=pipeline.group_size or pipeline.num_stages,
        virtual_pipeline_model_parallel_size=num_chunks if num_chunks > 1 else None,
        overlap_moe_expert_parallel_comm=False, num_microbatches_with_partial_activation_checkpoints=None,
        deallocate_pipeline_outputs=False, calculate_per_token_loss=True, defer_embedding_wgrad_compute=False,
    )  # fmt: skip


def _recorder(trace: Trace, config: SimpleNamespace, pp_group: SimpleNamespace) -> Any:
    """Communicator that records posts and waits in ``trace``."""
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    class Recorder(P2PCommunicator):
        def __init__(self) -> None:
            self.pp_group, self.config = pp_group, config  # type: ignore[assignment]
            self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

        def _communicate(self, *, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool,
                         tensor_shape: Any, wait_on_reqs: bool = True) -> Any:  # fmt: skip
            wanted = {"send_next": tensor_send_next is not None, "recv_prev": recv_prev,
                      "send_prev": tensor_send_prev is not None, "recv_next": recv_next}  # fmt: skip
            names = [name for name, is_wanted in wanted.items() if is_wanted]
            first = len(trace)
            trace.append(("post", *names))
            handles = {name: SimpleNamespace(wait=lambda name=name: trace.append(("wait", first, name)))
                       for name in names}  # fmt: skip
            if wait_on_reqs:
                for handle in handles.values():
                    handle.wait()
            return ("in" if recv_prev else None, "grad" if recv_next else None, None if wait_on_reqs else handles)

    return Recorder()


def _trace(pipeline: Pipeline, num_micro_batches: int, stage: int, forward_only: bool) -> Trace:
    from megatron.core.pipeline_parallel import schedules, utils
    from megatron.core.process_groups_config import ProcessGroupCollection

    trace: Trace = []
    num_chunks, config = pipeline.num_chunks, _config(pipeline)
    pp_group = SimpleNamespace(size=lambda: pipeline.num_stages, rank=lambda: stage)
    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)

    def forward(*_: Any, current_microbatch: int, vp_stage: int | None = None, **__: Any) -> Any:
        trace.append(("F", current_microbatch, vp_stage or 0))
        return SimpleNamespace(of=trace[-1][1:]), 0

    def backward(inputs: Any, output: Any, *_: Any) -> Any:
        trace.append(("B", *(output[0] if isinstance(output, list) else output).of))
        return "gradient"

    schedules.forward_step, schedules.backward_step = forward, backward
    utils.get_pg_rank, utils.get_pg_size = lambda group: group.rank(), lambda group: group.size()
    schedules.get_model_config = lambda _: config
    schedules.get_model_type = lambda _: None
    schedules.deallocate_output_tensor = lambda *_: None
    schedules.clear_embedding_activation_buffer = lambda *_: None
    import torch

    interleaved = num_chunks > 1
    schedule = (schedules.forward_backward_pipelining_with_interleaving if interleaved
                else schedules.forward_backward_pipelining_without_interleaving)  # fmt: skip
    schedule(
        forward_step_func=None, data_iterator=[None] * num_chunks, model=[torch.nn.Module() for _ in range(num_chunks)],
        num_microbatches=num_micro_batches, seq_length=1, micro_batch_size=1, forward_only=forward_only,
        p2p_communicator=_recorder(trace, config, pp_group), pg_collection=ProcessGroupCollection(tp=one, cp=one),
    )  # fmt: skip
    return trace


def traced(cases: Sequence[tuple[Pipeline, int, int, bool]]) -> list[Trace]:
    return run_ranks(trace_stages, 1, cases, init_group=False)[0]


@pytest.fixture(scope="module")
def traces() -> dict[tuple[Pipeline, int, int, bool], Trace]:
    """Return Megatron's actions on each stage, for up to four groups of micro-batches."""
    cases = [
        (pipeline, count * pipeline.multiple, stage, forward_only)
        for pipeline in PIPELINES
        for count in range(1, 10 if pipeline.multiple == 1 else 5)
        for stage in range(pipeline.num_stages)
        for forward_only in (False, True)
    ]
    return dict(zip(cases, traced(cases), strict=True))


def schedule_of(pipeline: Pipeline, count: int) -> SliceSchedule:
    sizes = {"num_chunks": pipeline.num_chunks, "group_size": pipeline.group_size}
    return seq1f1b_schedule(pipeline.num_stages, count, **sizes)


def passes(trace: Trace) -> tuple[Action, ...]:
    return tuple(Action(op[0], op[1], 0, op[2]) for op in trace if op[0] in "FB")


@pytest.mark.ranks
def test_actions_are_those_of_megatron(traces: dict[Any, Trace]) -> None:
    for (pipeline, count, stage, forward_only), trace in traces.items():
        expected = schedule_of(pipeline, count).stages[stage]
        wanted = tuple(action for action in expected if action.kind == "F") if forward_only else expected
        assert passes(trace) == wanted, (pipeline, count, stage)


@pytest.mark.ranks
def test_tensors_come_in_the_order_of_received_actions(traces: dict[Any, Trace]) -> None:
    for (pipeline, count, stage, forward_only), trace in traces.items():
        posted = [name for op in trace if op[0] == "post" for name in op[1:]]
        received = received_actions(schedule_of(pipeline, count), stage)
        for name, actions in zip(("recv_prev", "recv_next"), received, strict=True):
            assert posted.count(name) == (0 if forward_only and name == "recv_next" else len(actions))
        before = traces[pipeline, count, (stage - 1) % pipeline.num_stages, forward_only]
        sent_before = sent(before, "F", last_chunk(pipeline, stage == 0))
        assert sent_before == [action.micro_batch for action in received[0]]


def last_chunk(pipeline: Pipeline, wraps: bool) -> int | None:
    return pipeline.num_chunks - 1 if wraps else None


def sent(trace: Trace, kind: str, but_chunk: int | None) -> list[int]:
    """Return the micro-batches whose outputs a stage sends: all, except in the last chunk of the model."""
    return [micro_batch for done, micro_batch, _, chunk in passes(trace) if done == kind and chunk != but_chunk]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_a_shorter_pipeline_does_what_a_longer_one_does_in_the_same_order(pipeline: Pipeline) -> None:
    longest = schedule_of(pipeline, 8 * pipeline.multiple)
    for shorter in range(pipeline.multiple, 8 * pipeline.multiple, pipeline.multiple):
        left = [tuple(action for action in stage if action.micro_batch < shorter) for stage in longest.stages]
        assert list(schedule_of(pipeline, shorter).stages) == left


@dataclass(frozen=True)
class Joint:
    """Several pipelines with shared micro-batches: ``classes[rank][index]`` identifies a set of ranks."""

    pipeline: Pipeline
    counts: tuple[int, ...]
    classes: list[dict[int, tuple[int, int]]]
    members: dict[tuple[int, int], list[tuple[int, int]]]


def joint_of(pipeline: Pipeline, plan: StepPlan) -> Joint:
    """Ranks that are linked by rings in a slot run it together."""
    counts = micro_batch_counts(plan, multiple=pipeline.multiple)
    classes: list[dict[int, tuple[int, int]]] = [{} for _ in counts]
    members: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for index in range(max(counts)):
        linked = list(range(plan.num_ranks))
        for rank in range(plan.num_ranks):
            shards = plan.ranks[rank][index].shards if index < len(plan.ranks[rank]) else ()
            for member in (member for shard in shards for member in shard.ring):
                old, new = linked[member], linked[rank]
                linked = [new if one == old else one for one in linked]
        for rank, name in enumerate(linked):
            if index < counts[rank]:
                classes[rank][index] = (index, name)
                members[index, name].append((rank, index))
    return Joint(pipeline, counts, classes, members)


def finishes(joint: Joint, traces: dict[Any, Trace], forward_only: bool = False) -> bool:
    """Replay all stages of all pipelines together. Returns False for a deadlock."""
    num_stages = joint.pipeline.num_stages
    todo = {(rank, stage): traces[joint.pipeline, count, stage, forward_only]
            for rank, count in enumerate(joint.counts) for stage in range(num_stages)}  # fmt: skip
    at = dict.fromkeys(todo, 0)
    posts: dict[Any, int] = defaultdict(int)  # transfers posted, by (rank, sender, receiver, is a send)
    number: dict[Any, int] = {}  # position of a posted transfer in its queue
    moved = True
    while moved:
        moved = False
        for process, trace in todo.items():
            while at[process] < len(trace) and _step(joint, process, trace, at, todo, posts, number):
                moved = True
    return all(at[process] == len(trace) for process, trace in todo.items())


def _line(num_stages: int, rank: int, stage: int, name: str) -> tuple[Any, ...]:
    """Return the queue of a transfer: (pipeline, sender, receiver, direction of the pass)."""
    other = (stage + (1 if name.endswith("next") else -1)) % num_stages
    is_send = name.startswith("send")
    sender, receiver = (stage, other) if is_send else (other, stage)
    is_forward = name in ("send_next", "recv_prev")
    return rank, sender, receiver, is_forward


def _step(joint: Joint, process: tuple[int, int], trace: Trace, at: dict[Any, int], todo: dict[Any, Trace],
          posts: dict[Any, int], number: dict[Any, int]) -> bool:  # fmt: skip
    """Run the next action of a process if it can run now."""
    rank, stage = process
    kind, *rest = trace[at[process]]
    if kind == "post":
        for name in rest:
            line = (*_line(joint.pipeline.num_stages, rank, stage, name), name.startswith("send"))
            number[process, at[process], name] = posts[line]
            posts[line] += 1
    elif kind == "wait":
        line = _line(joint.pipeline.num_stages, rank, stage, rest[1])
        is_send = rest[1].startswith("send")
        if posts[*line, not is_send] <= number[process, rest[0], rest[1]]:
            return False
    else:
        micro_batch, chunk = rest
        together = joint.members[joint.classes[rank][micro_batch]]
        for other, index in together:
            there = todo[other, stage]
            if at[other, stage] == len(there) or there[at[other, stage]] != (kind, index, chunk):
                return False
        for other, _ in together:
            at[other, stage] += 1
        return True
    at[process] += 1
    return True


def random_plan(seed: int) -> StepPlan:
    """Return random aligned slots: overlapping rings of all widths, empty slots, idle ranks, tails of any length."""
    generator = random.Random(seed)
    num_ranks = generator.randint(2, 6)
    num_sequences = generator.randint(1, 14)
    widths = np.array([generator.choice((1, 1, 2, 3, num_ranks)) for _ in range(num_sequences)]).clip(max=num_ranks)
    firsts = np.array([generator.randint(0, num_ranks - width) for width in widths])
    orders = np.array([generator.randrange(8) for _ in widths])
    lengths = 8 * widths
    placed = PlacedRanks(num_ranks, lengths, firsts, widths, orders, aligned=True)
    return StepPlan(num_ranks, 1 << 20, tuple(lengths.tolist()), placed, aligned=True)


@pytest.mark.full
@pytest.mark.ranks
def test_1000_random_plans_of_aligned_slots_never_hang(traces: dict[Any, Trace]) -> None:
    for seed in range(1000):
        pipeline = PIPELINES[seed % len(PIPELINES)]
        joint = joint_of(pipeline, random_plan(seed))
        assert finishes(joint, traces, forward_only=seed % 10 == 0), (seed, pipeline, joint.counts)
