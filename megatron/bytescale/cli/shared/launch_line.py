"""A launch line resolved for N processes in one: Megatron makes its groups of fake processes, and nothing is trained.

torch's fake process group has the ranks of a real one, and its messages go nowhere.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import initialize

from bytescale_ext.attention.kernels.contract import accumulation_dtype
from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.memory.host_tables import EmbeddingConfig
from bytescale_ext.config.memory.ngram import NgramConfig
from bytescale_ext.config.planner import offload_layers, planner_of, slicing
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.sculpt import SculptConfig
from bytescale_ext.measure.fit import ring_bytes_per_token
from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.length_samplers import sample_documents
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.memory.held import held
from bytescale_ext.plan.memory.model_states import expert_parameters, num_parameters, stage_parameters
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale import features
from megatron.bytescale.arguments.parse import named_or_installed, parse
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.cli.plan import draw_pieces, read_lengths
from megatron.bytescale.cli.shared.model_flags import WRITTEN
from megatron.bytescale.cli.shared.stage_states import IN_HOST, choice_text, state_bytes
from megatron.bytescale.features.activations import flags as activations
from megatron.bytescale.features.activations.flags import cost_in_seconds
from megatron.bytescale.features.slices.flags import stage_memory
from megatron.bytescale.training.stock import data_prefixes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DryRun:
    """What a launch line would do.

    Attributes:
        about: model, processes and features, in words.
        rank: the process whose groups are listed.
        groups: name -> its ranks.
        step: figures of one planned step, in words.
        received_gb: what the busiest process receives in the step, by kind.
        memory_gb: device memory of each stage, by kind.
    """

    about: dict[str, str]
    rank: int
    groups: dict[str, list[int]]
    step: dict[str, str]
    received_gb: dict[str, float]
    memory_gb: list[dict[str, float]]


@dataclass(frozen=True)
class Launch:
    """A launch line that was resolved.

    Attributes:
        args: Megatron's arguments.
        run: everything that is decided.
    """

    args: Any
    run: RunConfig

    @property
    def batch(self) -> int:
        """Documents of a step, of the last ones where steps grow."""
        schedule = self.run.get(HdpConfig).schedule
        return schedule[-1][1] if schedule else int(self.args.global_batch_size)

    def draw(self, lengths: Sequence[int] | None, seed: int) -> list[int]:
        """Return the lengths of one step, drawn from documents that are cut at ``--seq-length``.

        ``lengths``: of the documents; None: those of ``--data-path``, or of its windows. Raises ValueError where these
        are not here.
        """
        windows = self.run.find(SculptConfig)
        if lengths is None and windows is not None:
            return windows.drawn(self.batch, seed)
        if lengths is None:
            files = [Path(f"{prefix}.idx") for prefix in data_prefixes(self.args)]
            if not files or not all(file.exists() for file in files):
                raise ValueError("no lengths: give --sampler or --lengths, or a --data-path whose .idx files are here")
            lengths = [length for file in files for length in read_lengths(file)]
            if self.run.find(AnswerLossConfig) is not None:  # their ends are left out
                lengths = [min(length, self.args.seq_length) for length in lengths]
        return self.of_step(partial(draw_pieces, lengths, self.args.seq_length, seed=seed))

    def sample(self, sampler: str, seed: int) -> list[int]:
        """Return the lengths of one step of a published distribution. Raises ValueError for an unknown one."""
        return self.of_step(lambda count: list(sample_documents(sampler, self.args.seq_length, count, seed)))

    def of_step(self, draw: Callable[[int], list[int]]) -> list[int]:
        """Return the lengths of one step, of which ``draw`` returns a number that it is given."""
        lengths, num_tokens = draw(self.batch), self.run.get(HdpConfig).global_tokens
        if num_tokens is None:
            return lengths
        while sum(lengths) <= num_tokens:
            lengths = draw(2 * len(lengths))
        return lengths[: bisect_right(list(accumulate(lengths)), num_tokens)]

    def plan(self, lengths: Sequence[int]) -> DryRun:
        """Plan a step of these documents, and count what it sends and holds."""
        begun = time.process_time()
        plan = planner_of(self.run)(lengths)
        seconds = time.process_time() - begun
        node = self.run.cluster.ranks_per_node
        check_step_plan(plan, lengths, self.run.get(HdpConfig).rows_multiple, offload_layers(self.run), node)
        counts = micro_batch_counts(plan, multiple=self.group_size)
        table = ShardTable.of(plan).with_counts(np.array(counts))
        cut = plan.slicing or slicing(self.run)
        from_rings = self.ring_bytes(table, cut)
        step = self.step(table, cut, lengths, seconds)
        step["ring traffic"] = f"{from_rings.sum() * sum(self.run.stage_layers) / 1e6:,.6g} MB"
        if node is not None:
            step["between nodes"] = self.between_nodes(table, cut, node)
        return DryRun(
            self.about(), self.args.rank, groups_of_this_process(), step, self.received_gb(table, from_rings),
            self.memory_gb(table, cut),
        )  # fmt: skip

    @property
    def group_size(self) -> int:
        """Micro-batches that pass a virtual stage together. A process runs whole groups; without virtual stages, 1."""
        if not self.args.virtual_pipeline_model_parallel_size:
            return 1
        return int(self.args.microbatch_group_size_per_vp_stage or len(self.run.stage_layers))

    def about(self) -> dict[str, str]:
        """Return model, processes and features in words."""
        args, run = self.args, self.run
        tensor, stages = run.process.tensor_parallel, len(run.stage_layers)
        shape, where = run.shape, "GPUs" if run.process.on_cuda else "CPU"
        experts = f", {shape.num_experts} experts in {shape.num_expert_layers} layers" if shape.num_experts else ""
        return {
            "model": f"{(num_parameters(shape) + expert_parameters(shape)) / 1e9:.3g} G parameters, "
            f"{shape.num_layers} layers of {shape.hidden}, vocabulary {shape.vocab}{experts}; "
            f"{str(args.params_dtype).removeprefix('torch.')}",
            "processes": f"{args.world_size:,} = {tensor} tensor-parallel x {stages} stages x {run.cluster.num_ranks} "
            f"HDP ranks, of up to {run.cluster.tokens_per_rank:,} tokens each; {where}",
            "features": ", ".join(f"{one.name} ({one.flag})" for one in features.enabled(args)),
            **choice_text(run),
        }

    def step(self, table: ShardTable, cut: Slicing, lengths: Sequence[int], seconds: float) -> dict[str, str]:
        """Return figures of the plan in words. ``seconds``: that planning took."""
        run, cost = self.run, cost_in_seconds(self.run)
        last = len(run.stage_layers) - 1
        nodes = cost.nodes(run.cluster)
        stages = tuple(cost.stage(layers, number == last).on(nodes) for number, layers in enumerate(run.stage_layers))
        replayed, bound = replay_stages(table, stages, cut), lower_bounds(lengths, run.cluster, stages, cut).largest
        widths, numbers = np.unique(table.widths[table.members == 0], return_counts=True)
        by_width = (f"{number:,} on {width:,}" for width, number in zip(widths, numbers, strict=True))
        counts = table.counts
        return {
            "documents": f"{len(lengths):,} of {sum(lengths):,} tokens, the longest {max(lengths):,}",
            "on ranks": ", ".join(by_width),
            "micro-batches of a rank": f"min {counts.min()}, mean {counts.mean():.1f}, max {counts.max()}",
            "slices": str(cut),
            "time": f"{replayed.makespan:.4g} s predicted from {'--cost-file' if run.cost else 'assumed rates'}, "
            f"{replayed.makespan / bound:.3f} of the lower bound of any plan",
            "lost": f"{replayed.idle_share:.1%} idle, {replayed.exposed_share:.1%} in exchange that nothing hides",
            "planning": f"{seconds:.2f} s of one core, {seconds / replayed.makespan:.1%} of the step, beside training",
        }

    def ring_bytes(self, table: ShardTable, cut: Slicing, node: int | None = None) -> Floats:
        """Return the bytes that each HDP rank receives from its rings in one layer: [num_ranks].

        With ``node``, those that it sends to other nodes of so many ranks.
        """
        run, dtype = self.run, self.args.params_dtype
        sizes = (dtype.itemsize, accumulation_dtype(dtype).itemsize)
        of_keys, both = ring_bytes_per_token(run.shape, run.process.tensor_parallel, *sizes)
        keys, sums = ring_tokens(table, run.get(HdpConfig).cost.both, cut)
        ranks = table.row_ranks[table.rows]
        share = 1.0 if node is None else table.sent_to_other_nodes(node)
        each = (of_keys * keys + (both - of_keys) * sums) * share
        return np.bincount(ranks, weights=each, minlength=table.num_ranks)

    def between_nodes(self, table: ShardTable, cut: Slicing, node: int) -> str:
        """Return in words what rings send between nodes of ``node`` HDP ranks, and how many use all links for it."""
        rank_bytes = self.ring_bytes(table, cut, node) * max(self.run.stage_layers)
        assert table.inner_rings is not None, "the table is that of a plan"
        seqs = table.members == 0
        nested = np.count_nonzero(seqs & (table.inner_rings > 1))
        wide = np.count_nonzero(seqs & Nodes(node, 1.0).crossed(table.row_ranks[table.rows], table.widths))
        return (
            f"{rank_bytes.sum() / 1e6:,.6g} MB of a stage, {rank_bytes.max() / 1e6:,.6g} MB by the process that sends "
            f"most; {nested:,} of {wide:,} documents on several nodes in hierarchical rings"
        )

    def received_gb(self, table: ShardTable, from_rings: Floats) -> dict[str, float]:
        """Return what the busiest process of each kind receives in the step.

        ``from_rings``: what ``ring_bytes`` returned, [num_ranks].
        """
        args, run = self.args, self.run
        element, layers = args.params_dtype.itemsize, max(run.stage_layers)
        ranks = table.row_ranks[table.rows]
        tokens = np.bincount(ranks, weights=table.tokens, minlength=table.num_ranks).max()
        shared = run.process.tensor_parallel if args.sequence_parallel else 1
        chunks, stages = args.virtual_pipeline_model_parallel_size or 1, len(run.stage_layers)
        directions = min(2, stages - 1) if chunks == 1 else 2
        output = run.shape.hidden * element / shared
        others = 1 - 1 / run.cluster.num_ranks
        reduced = 4 if args.accumulate_allreduce_grads_in_fp32 else element
        gathered = element if args.use_distributed_optimizer else reduced
        return {
            "keys and gradients in rings": layers * float(from_rings.max()) / 1e9,
            "outputs and gradients of stages": directions * chunks * tokens * output / 1e9,
            "gradients and parameters": (reduced + gathered) * others * max(self.parameters()) / 1e9,
        }

    def parameters(self) -> list[float]:
        """Return the parameters of a process of each stage, without experts."""
        run, stages, tensor = self.run, self.run.stage_layers, self.run.process.tensor_parallel
        last = len(stages) - 1
        ngram, on_device = run.find(NgramConfig), run.find(EmbeddingConfig) is None
        of_memories = [0] * len(stages) if ngram is None else ngram.stage_parameters(run.shape.hidden, stages)
        return [
            of_memories[stage] + stage_parameters(shape, tensor, not stage and on_device, stage == last)
            for stage, shape in enumerate(run.shape.stages(stages))
        ]

    def memory_gb(self, table: ShardTable, cut: Slicing) -> list[dict[str, float]]:
        """Return the device memory of each stage, of the HDP rank that holds most."""
        run = self.run
        under_policy = run.find(ActivationConfig) is not None
        of_plan = [] if under_policy else self._held(table, cut)
        rows = []
        of_states = state_bytes(self.args, run, self.parameters())
        for stage, (layers, states) in enumerate(zip(run.stage_layers, of_states, strict=True)):
            held_bytes = self._under_policy(stage, cut) if under_policy else of_plan[stage]
            in_gb = {name: each / 1e9 for name, each in (states | held_bytes).items()}
            total = sum(each for name, each in in_gb.items() if name not in IN_HOST)
            rows.append({"stage": stage, "layers": layers, **in_gb, "total": total})
        return rows

    def _held(self, table: ShardTable, cut: Slicing) -> list[dict[str, float]]:
        """Return the bytes that each stage holds of the plan, without an activation policy."""
        memory, chunks = stage_memory(self.args, self.run), self.args.virtual_pipeline_model_parallel_size or 1
        stages = held(table, cut, self.run.get(HdpConfig).cost.both, memory, chunks).stage_parts(memory)
        return [{name: getattr(one, name) for name in ("activations", "keys", "sums", "working")} for one in stages]

    def _under_policy(self, stage: int, cut: Slicing) -> dict[str, float]:
        """Return the bytes of a stage by the forecast of its activation policy, for full micro-batches."""
        run = self.run
        config = activations.resolve(self.args, replace(run, process=replace(run.process, stage=stage)))
        config = config.in_slices(cut)
        needed = forecast(config.plan(config.largest), config.largest, config.machine)
        return {"activations": needed.device_bytes, "host": needed.host_bytes}


def ring_tokens(table: ShardTable, cost: CostModel, cut: Slicing) -> tuple[Floats, Floats]:
    """Return the tokens of other ranks that each shard receives: with their keys, and with sums of their gradients.

    Both [n], over all slices. Keys travel in both passes; those that are kept only once, in the forward pass.
    """
    lengths, widths = table.lengths.astype(np.float64), table.widths.astype(np.float64)
    shares = SliceShares.of(cost, lengths, widths, cut)
    up_to_end = np.cumsum(shares.tokens, axis=1)
    of_sums = np.where(shares.summed[:, None], shares.tokens, up_to_end).sum(axis=1)
    of_keys = shares.exchanged.sum(axis=1) * np.where(shares.kept, 1.0, 2.0)
    others = lengths * (widths - 1) / widths
    return others * of_keys, others * of_sums


def prepare(flags: Sequence[str], world_size: int, rank: int, ranks_per_node: int, on_cpu: bool) -> Launch:
    """Resolve a launch line as process ``rank`` of ``world_size`` would, and make Megatron's groups. Once in a process.

    ``on_cpu``: the processes run on CPU; otherwise on GPUs, which this machine need not have.

    Raises:
        ValueError: what the training command refuses, or a line without documents.
    """
    local = min(ranks_per_node, world_size)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(local))
    args = parse(["bytescale dry-run", *flags], on_cpu, _settle, named_or_installed(flags))
    run = resolve(args)
    initialize._initialize_distributed(None, None, None)
    return Launch(args, run)


def _settle(args: Any) -> None:
    """Leave files alone and let no process be waited for. Raises ValueError where no documents are planned."""
    if not args.hybrid_data_parallel:
        raise ValueError("a dry run plans documents: add --hybrid-data-parallel and --hdp-tokens-per-rank")
    vars(args).update(dict.fromkeys(WRITTEN), fake_process_group=True, use_gloo_process_groups=False)


def groups_of_this_process() -> dict[str, list[int]]:
    """Return the ranks of Megatron's groups that this process is in, by name."""
    groups = {
        "tensor parallel": parallel_state.get_tensor_model_parallel_group(),
        "pipeline": parallel_state.get_pipeline_model_parallel_group(),
        "HDP": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "expert parallel": parallel_state.get_expert_model_parallel_group(),
        "expert data parallel": parallel_state.get_expert_data_parallel_group(),
    }
    found = {name: dist.get_process_group_ranks(group) for name, group in groups.items()}
    has_experts = len(found["expert parallel"]) > 1
    return {name: ranks for name, ranks in found.items() if has_experts or not name.startswith("expert")}
