"""Time, memory and traffic of a planned step, for dry runs, searches, simulations and the training log."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.learned import UNLEARNED, LearnedCosts
from bytescale_ext.plan.cost.model_shape import ring_bytes_per_token
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.evaluate.replay import StageReplay, replay_stages
from bytescale_ext.plan.evaluate.slicing_choice import full_micro_batches
from bytescale_ext.plan.memory.first_layers import FirstLayers
from bytescale_ext.plan.memory.held import DeviceParts, peak_memory
from bytescale_ext.plan.schedule.actions import most_slices
from bytescale_ext.plan.setup.choose import Decision
from bytescale_ext.plan.setup.costs import layer_costs, recomputed, slowest_stage, stage_costs
from bytescale_ext.plan.setup.memory import (
    input_bytes,
    parameters,
    recomputing_memory,
    stage_memory,
    stage_state_bytes,
    stage_update_bytes,
    state_cases,
)
from bytescale_ext.plan.setup.messages import token_seconds
from bytescale_ext.plan.setup.offload import offloading_policy
from bytescale_ext.plan.setup.policy import PolicySlices, UnderPolicy, under_policy
from bytescale_ext.plan.setup.setup import BLOCK, Setup
from bytescale_ext.plan.setup.update import UpdateTime, end_passes, update_of
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import ONE_SLICE, Slicing

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
LOAD_BYTES: Final = 4
"""Bytes of the number of a document's tokens that choose an expert."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of one step, which takes the sum of the four parts.

    Attributes:
        compute: computation, mean of all devices.
        exposed: exchange of keys that does not overlap with computation, mean of all devices.
        idle: waiting for rings and pipeline stages, mean of all devices.
        update: gradients, parameters and optimizer, if they do not overlap with computation.
        makespan: time from the first forward pass to the last backward pass.
    """

    compute: float
    exposed: float
    idle: float
    update: float
    makespan: float

    @property
    def seconds(self) -> float:
        """Time of the step."""
        return self.compute + self.exposed + self.idle + self.update


@dataclass(frozen=True, slots=True)
class StageBytes:
    """Memory of one process of a stage at its peak, in bytes.

    Attributes:
        device: device memory by kind.
        host: host memory for activations and swapped keys.
        pages: host memory for pages of model states.
    """

    device: DeviceParts
    host: float = 0.0
    pages: float = 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that the busiest process receives in a step, by kind.

    Attributes:
        rings: keys, values and their gradients from the ranks of its rings.
        stages: outputs and gradients from neighbouring pipeline stages.
        update: gradients and parameters from the ranks that have the same.
        all_rings: bytes that all ranks receive in rings, in all layers.
    """

    rings: float
    stages: float
    update: float
    all_rings: float


@dataclass(frozen=True)
class Forecast:
    """Predicts the steps of a decision."""

    decision: Decision

    @property
    def setup(self) -> Setup:
        """The setup of the decision."""
        return self.decision.setup

    @cached_property
    def whole(self) -> UnderPolicy | None:
        """Stages under the activation policy in the given slices; None without policy, or if slices are chosen."""
        setup = self.setup
        if setup.chooses_slices or not setup.policy.is_on or setup.plans_offload:
            return None
        return under_policy(setup, setup.given_slicing, self.decision.link_share)

    def under_policy(self, slicing: Slicing) -> UnderPolicy | None:
        """Return the stages under the activation policy in the slices of a step; None without a policy."""
        slices = self.decision.slices
        return slices.of(slicing) if isinstance(slices, PolicySlices) else self.whole

    def stages(self, slicing: Slicing, learned: LearnedCosts = UNLEARNED) -> tuple[StageCost, ...]:
        """Return the seconds of each stage, or of each virtual stage chunk by chunk, in the slices of a step.

        Learned factors include what an activation policy adds to the passes.
        """
        setup, nodes = self.setup, self.setup.cost.nodes(self.setup.cluster)
        virtual = self.num_chunks(slicing) > 1
        if learned.factors != UNLEARNED.factors:
            return tuple(map(learned.of_stage, self._virtual_costs if virtual else stage_costs(setup)))
        policy = self.under_policy(slicing)
        if policy is not None:
            return tuple(stage.on(nodes) for stage in (policy.virtual if virtual else policy.stages))
        if setup.numerics.recompute == BLOCK:
            return recomputed(setup, self._virtual_layers if virtual else setup.mesh.stage_layers)
        return self._virtual_costs if virtual else stage_costs(setup)

    @property
    def _virtual_layers(self) -> tuple[int, ...]:
        """Layers of each virtual stage, chunk by chunk."""
        mesh = self.setup.mesh
        return tuple(layers // mesh.virtual_stages for layers in mesh.stage_layers) * mesh.virtual_stages

    @cached_property
    def _virtual_costs(self) -> tuple[StageCost, ...]:
        """Seconds of each virtual stage, chunk by chunk."""
        return layer_costs(self.setup, self._virtual_layers)

    def num_chunks(self, slicing: Slicing) -> int:
        """Return the virtual stages of each stage that a replay runs; slices are replayed on whole stages."""
        mesh = self.setup.mesh
        equal = not any(layers % mesh.virtual_stages for layers in mesh.stage_layers)
        return mesh.virtual_stages if slicing.num_slices == 1 and equal else 1

    @cached_property
    def _update(self) -> UpdateTime:
        """Update of the process with most parameters."""
        setup = self.setup
        most = max(parameters(setup), key=lambda counted: counted.count)
        return update_of(setup.cost, most, setup.cluster, setup.mesh.shares_optimizer, setup.states.sizes)

    @cached_property
    def _token_seconds(self) -> Floats:
        """Seconds that a token adds to a message from each stage to the next, ``token_seconds``."""
        return token_seconds(self.setup)

    def message_seconds(self, table: ShardTable, slicing: Slicing) -> Floats:
        """Return the seconds of a message of a slice of each micro-batch after each virtual stage but the last.

        They are [num_rows, V - 1]: a latency, and the time of the tokens on the links between the two devices.
        """
        per_token = np.tile(self._token_seconds, self.num_chunks(slicing))[table.row_ranks, :-1]
        return self.setup.cost.latency + per_token * (table.row_tokens / slicing.num_slices)[:, None]

    @property
    def optimizer_seconds(self) -> float:
        """Seconds of the optimizer, which overlap with nothing."""
        return self._update.optimizer

    def table(self, plan: StepPlan) -> tuple[ShardTable, Slicing]:
        """Return the shards of a plan on ranks that run whole groups of micro-batches, and its slices."""
        mesh = self.setup.mesh
        group = mesh.num_stages if mesh.virtual_stages > 1 else 1
        counts = micro_batch_counts(plan, mesh.expert_ranks, group)
        slicing = plan.slicing or (ONE_SLICE if self.setup.chooses_slices else self.setup.given_slicing)
        return ShardTable.of(plan).with_counts(np.array(counts)), slicing

    def replay(self, table: ShardTable, slicing: Slicing, learned: LearnedCosts = UNLEARNED) -> StageReplay:
        """Return the times of each slice of a step on each stage, with messages between stages."""
        messages, cluster = self.message_seconds(table, slicing), self.setup.cluster
        stages, chunks = self.stages(slicing, learned), self.num_chunks(slicing)
        if learned.stage_speeds:
            table = table.at(np.tile(np.array(learned.stage_speeds).T, chunks))
        else:
            table = table.at((replace(cluster, speeds=learned.speeds) if learned.speeds else cluster).unequal_speeds())
        return replay_stages(table, stages, slicing, chunks, p2p_seconds=messages)

    def time(self, table: ShardTable, slicing: Slicing, learned: LearnedCosts = UNLEARNED) -> StepTime:
        """Return the time of a step, from its shards, its slices and learned costs."""
        result = self.replay(table, slicing, learned)
        exposed, idle = (share * result.makespan for share in (result.exposed_share, result.idle_share))
        in_slots = (coupling(result, slicing.num_slices, self.setup.mesh.expert_ranks) - 1.0) * result.makespan
        return StepTime(
            compute=result.makespan - exposed - idle,
            exposed=exposed,
            idle=idle + in_slots,
            update=self._update.exposed(*end_passes(result, slicing.num_slices)),
            makespan=result.makespan,
        )

    def time_of_plan(self, plan: StepPlan, learned: LearnedCosts = UNLEARNED) -> StepTime:
        """Return the time of a planned step under learned costs."""
        return self.time(*self.table(plan), learned)

    def memory(self, table: ShardTable, slicing: Slicing) -> list[StageBytes]:
        """Return the memory of each stage in a step, on the HDP rank with the highest peak.

        If a policy moves activations, micro-batches count as full.
        """
        setup, policy = self.setup, self.under_policy(slicing)
        pages = [float(case.host_bytes) for case in state_cases(setup)] if setup.states.decided.stage else None
        pages = pages or [0.0] * setup.mesh.num_stages
        if policy is not None and not policy.keeps_all:
            rows = zip(policy.state_bytes, policy.update_bytes, policy.forecasts, pages, strict=True)
            return [
                StageBytes(DeviceParts(held.device_bytes, 0.0, 0.0, states, 0.0, update), held.host_bytes, page)
                for states, update, held, page in rows
            ]
        if setup.plans_offload:
            policy_of_all = offloading_policy(setup)
            largest = policy_of_all.largest
            most = forecast(policy_of_all.plan(largest), largest, policy_of_all.machine).device_bytes
            rows_of = zip(stage_state_bytes(setup), stage_update_bytes(setup), pages, strict=True)
            return [
                StageBytes(DeviceParts(most, 0.0, 0.0, states, 0.0, update), 0.0, page)
                for states, update, page in rows_of
            ]
        if setup.numerics.recompute == BLOCK:
            blocks = zip(self._block_parts(table, slicing), pages, strict=True)
            return [StageBytes(parts, 0.0, page) for parts, page in blocks]
        memory, cost = stage_memory(setup), slowest_stage(setup)[1].both
        peaks = peak_memory(table, slicing, cost, memory, setup.mesh.virtual_stages)
        parts, in_host = peaks.stage_parts(memory), peaks.stage_host_bytes(memory)
        return [StageBytes(*row) for row in zip(parts, in_host, pages, strict=True)]

    def _block_parts(self, table: ShardTable, slicing: Slicing) -> list[DeviceParts]:
        """Return the memory of each stage, whose first layers are recomputed."""
        setup, chunks = self.setup, self.setup.mesh.virtual_stages
        count = setup.numerics.recomputed_layers * chunks
        blocks = FirstLayers(stage_memory(setup), recomputing_memory(setup), count)
        return blocks.parts(table, slicing, slowest_stage(setup)[1].both, chunks)

    @cached_property
    def full_bytes(self) -> tuple[float, float]:
        """Peak memory of a device, and peak host memory of a process, with full micro-batches without slices."""
        setup = self.setup
        if self.whole is not None:
            return self.whole.device_bytes, self.whole.host_bytes
        mesh = setup.mesh
        if mesh.virtual_stages > 1:
            table = full_micro_batches(4 * mesh.num_stages, setup.cluster.tokens_per_rank)
            return max(stage.device.total for stage in self.memory(table, ONE_SLICE)), 0.0
        if setup.numerics.recompute == BLOCK:
            held = block_bytes(setup, np.array([setup.numerics.recomputed_layers]))[:, 0]
            held = np.maximum(held, stage_update_bytes(setup))
            return float(np.max(held + np.array(stage_state_bytes(setup)))), 0.0
        memory = stage_memory(setup).unsliced()
        in_flight = enumerate(tokens_in_flight(setup))
        return memory.most_bytes([tokens * memory.token_bytes(stage) for stage, tokens in in_flight]), 0.0

    def traffic(self, table: ShardTable, slicing: Slicing) -> Traffic:
        """Return the bytes that processes receive in a step."""
        setup, mesh, numerics = self.setup, self.setup.mesh, self.setup.numerics
        gradient = setup.states.sizes.gradient
        ranks = table.row_ranks[table.rows]
        tokens = np.bincount(ranks, weights=table.tokens, minlength=table.num_ranks).max()
        shared = mesh.tensor_parallel if mesh.sequence_parallel else 1
        directions = min(2, mesh.num_stages - 1) if mesh.virtual_stages == 1 else 2
        output = setup.shape.hidden * numerics.element_bytes / shared
        others = 1 - 1 / setup.cluster.num_ranks
        gathered = numerics.element_bytes if mesh.shares_optimizer else gradient
        from_rings = self.ring_bytes(table, slicing)
        return Traffic(
            rings=max(mesh.stage_layers) * float(from_rings.max()),
            stages=directions * mesh.virtual_stages * float(tokens) * output,
            update=(gradient + gathered) * others * max(counted.dense for counted in parameters(setup)),
            all_rings=float(from_rings.sum()) * sum(mesh.stage_layers),
        )

    @property
    def load_bytes(self) -> float:
        """Bytes of one document's expert loads, which each member of its ring sends to each other: mean of a layer."""
        shape = self.setup.shape
        of_layers = shape.num_expert_layers / shape.num_layers
        return self.setup.numerics.counts_documents * LOAD_BYTES * shape.num_experts * of_layers

    def ring_bytes(self, table: ShardTable, slicing: Slicing, node: int | None = None) -> Floats:
        """Return the bytes that each HDP rank receives from its rings in one layer: [num_ranks].

        With ``node``, the bytes that it sends to other nodes, of ``node`` ranks each.
        """
        setup, numerics = self.setup, self.setup.numerics
        sizes = numerics.element_bytes, numerics.sum_bytes
        of_keys, both = ring_bytes_per_token(setup.shape, setup.mesh.tensor_parallel, *sizes)
        keys, sums = ring_tokens(table, slowest_stage(setup)[1].both, slicing)
        share = 1.0 if node is None else table.sent_to_other_nodes(node)
        each = (of_keys * keys + (both - of_keys) * sums + self.load_bytes * (table.widths - 1)) * share
        return np.bincount(table.row_ranks[table.rows], weights=each, minlength=table.num_ranks)


def ring_tokens(table: ShardTable, cost: CostModel, slicing: Slicing) -> tuple[Floats, Floats]:
    """Return the tokens of other ranks that each shard receives: with their keys, and with sums of their gradients.

    Both are [n], over all slices. Keys travel in both passes; kept keys travel only once, in the forward pass.
    """
    lengths, widths = table.lengths.astype(np.float64), table.widths.astype(np.float64)
    shares = SliceShares.of(cost, lengths, widths, slicing)
    up_to_end = np.cumsum(shares.tokens, axis=1)
    of_sums = np.where(shares.summed[:, None], shares.tokens, up_to_end).sum(axis=1)
    of_keys = shares.exchanged.sum(axis=1) * np.where(shares.kept, 1.0, 2.0)
    others = lengths * (widths - 1) / widths
    return others * of_keys, others * of_sums


def documents_on_nodes(table: ShardTable, node: int) -> tuple[int, int]:
    """Return the number of documents on several nodes of ``node`` HDP ranks, and the number with nested rings."""
    assert table.inner_rings is not None, "the table is that of a plan"
    first = table.members == 0
    nested = np.count_nonzero(first & (table.inner_rings > 1))
    wide = np.count_nonzero(first & Nodes(node, 1.0).cross_nodes(table.row_ranks[table.rows], table.widths))
    return int(wide), int(nested)


def tokens_in_flight(setup: Setup) -> list[int]:
    """Return the peak number of tokens with activations on each stage, in full micro-batches without slices."""
    num_stages, tokens = setup.mesh.num_stages, setup.cluster.tokens_per_rank
    return [most_slices(num_stages, ONE_SLICE, stage) * tokens for stage in range(num_stages)]


def block_bytes(setup: Setup, recomputed_layers: Ints) -> Floats:
    """Return the device bytes of stages that recompute their first layers: [num_stages, n], without model states.

    Micro-batches are full, and have neither slices nor virtual stages. These are the peaks of ``FirstLayers`` in closed
    form, for searches that try many numbers of layers.

    Args:
        setup: setup without full recompute.
        recomputed_layers: numbers of recomputed layers of each stage, [n].
    """
    memory, num_tokens = stage_memory(setup), np.array(float(setup.cluster.tokens_per_rank))
    again = recomputing_memory(setup).unsliced()
    assert again.passes is not None
    runs_again = again.passes.of_backward(num_tokens, num_tokens, has_loss=False) + num_tokens * again.buffer_bytes
    layers, tokens = np.array(memory.num_layers)[:, None], np.array(tokens_in_flight(setup))[:, None]
    recomputed = np.minimum(layers, recomputed_layers)
    kept = (layers - recomputed) * memory.layer.activations
    at_loss = np.array(memory.working_bytes)[:, None] + tokens * kept
    in_layer = np.where(recomputed > 0, runs_again + (tokens - num_tokens) * kept, 0.0)
    angles = np.where(recomputed > 0, again.layer.angles, 0.0)
    return np.asarray(tokens * (recomputed * input_bytes(setup) + angles) + np.maximum(at_loss, in_layer))


def coupling(result: StageReplay, num_slices: int, expert_parallel: int) -> float:
    """Return the slowdown of a step because ranks that share experts run slot by slot.

    A slot takes a group of these ranks as long as its slowest rank. The replay of a plan does not model these waits. So
    its time is multiplied by the ratio of the busiest stage of a group, slot by slot, to the busiest stage of a rank.
    This is exact without pipelines and rings.
    """
    if expert_parallel == 1:
        return 1.0
    seconds, stages = result.stops - result.starts, result.num_stages
    of_stages = seconds.sum(axis=1).reshape(len(seconds), -1, stages).sum(axis=1)
    stops = result.counts.cumsum() * num_slices
    ranks = [of_stages[stop - count * num_slices : stop] for stop, count in zip(stops, result.counts, strict=True)]
    groups = [ranks[first : first + expert_parallel] for first in range(0, len(ranks), expert_parallel)]
    alone = max(float(rank.sum(axis=0).max()) for rank in ranks)
    coupled = max(float(np.max(group, axis=0).sum(axis=0).max()) for group in groups)
    return coupled / alone if alone else 1.0
