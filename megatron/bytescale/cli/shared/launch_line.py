"""Resolve the launch line of N ranks in one process: Megatron makes its groups, and nothing is trained.

torch's fake process group has the ranks of a real group and sends no messages.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.training import initialize

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.sculpt import SculptConfig
from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.evaluate.length_samplers import sample_documents
from bytescale_ext.plan.memory.model_states import expert_parameters, num_parameters
from bytescale_ext.plan.setup.choose import Decision, remaining_text
from bytescale_ext.plan.setup.costs import cost_source
from bytescale_ext.plan.setup.forecast import Forecast, documents_on_nodes
from bytescale_ext.plan.setup.planner import planner_of
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale import features
from megatron.bytescale.arguments.data import DataPaths
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.parse import named_or_installed, parse
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.cli.shared.lengths import draw_pieces, read_lengths
from megatron.bytescale.cli.shared.model_flags import WRITTEN


@dataclass(frozen=True)
class DryRun:
    """Forecast of a launch line.

    Attributes:
        about: model, processes and features, in words.
        rank: rank whose groups are listed.
        groups: ranks of each group, by name.
        step: figures of one planned step, in words.
        received_gb: GB that the busiest rank receives in the step, by kind.
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
    """A resolved launch line.

    Attributes:
        args: Megatron's arguments.
        run: configuration of the run.
    """

    args: Any
    run: RunConfig

    @property
    def batch(self) -> int:
        """Documents of a step, at the end of the training if steps grow."""
        schedule = self.run.get(HdpConfig).schedule
        return schedule[-1][1] if schedule else int(self.args.global_batch_size)

    def draw(self, lengths: Sequence[int] | None, seed: int) -> list[int]:
        """Return the lengths of one step, drawn from documents that are cut at ``--seq-length``.

        Args:
            lengths: document lengths; None: lengths of the data sets or windows of ``--data-path``.
            seed: seed of the draw.

        Raises:
            ValueError: this machine has no data sets of ``--data-path``.
        """
        windows = self.run.find(SculptConfig)
        if lengths is None and windows is not None:
            return windows.drawn(self.batch, seed)
        if lengths is None:
            files = [Path(f"{prefix}.idx") for prefix in options_of(self.args, DataPaths).prefixes()]
            if not files or not all(file.exists() for file in files):
                raise ValueError("no lengths: give --sampler or --lengths, or a --data-path whose .idx files are here")
            lengths = [length for file in files for length in read_lengths(file)]
            if self.run.find(AnswerLossConfig) is not None:  # their ends are left out
                lengths = [min(length, self.args.seq_length) for length in lengths]
        return self.of_step(partial(draw_pieces, lengths, self.args.seq_length, seed=seed))

    def sample(self, sampler: str, seed: int) -> list[int]:
        """Return the lengths of one step, drawn from a published distribution. Raises ValueError if it is unknown."""
        return self.of_step(lambda count: list(sample_documents(sampler, self.args.seq_length, count, seed)))

    def of_step(self, draw: Callable[[int], list[int]]) -> list[int]:
        """Return the lengths of one step; ``draw`` returns as many lengths as its argument says."""
        lengths, num_tokens = draw(self.batch), self.run.get(HdpConfig).global_tokens
        if num_tokens is None:
            return lengths
        while sum(lengths) <= num_tokens:
            lengths = draw(2 * len(lengths))
        return lengths[: bisect_right(list(accumulate(lengths)), num_tokens)]

    def plan(self, lengths: Sequence[int]) -> DryRun:
        """Plan a step of documents of these lengths, and forecast its time, memory and traffic."""
        begun = time.process_time()
        plan = planner_of(self.run.decision)(lengths)
        seconds = time.process_time() - begun
        setup, node = self.run.decision.setup, self.run.cluster.ranks_per_node
        check_step_plan(plan, lengths, setup.rows_multiple, self.run.decision.offloading_layers, node)
        forecast = Forecast(self.run.decision)
        table, slicing = forecast.table(plan)
        step, traffic = self.step(forecast, plan, seconds), forecast.traffic(table, slicing)
        step["ring traffic"] = bytes_text(traffic.all_rings)
        if node is not None:
            step["between nodes"] = between_nodes(forecast, table, slicing, node)
        received = {
            "keys and gradients in rings": traffic.rings / 1e9,
            "outputs and gradients of stages": traffic.stages / 1e9,
            "gradients and parameters": traffic.update / 1e9,
        }
        return DryRun(
            self.about(), self.args.rank, groups_of_this_process(), step, received, memory_gb(forecast, table, slicing)
        )

    def about(self) -> dict[str, str]:
        """Return model, processes and features in words."""
        args, run = self.args, self.run
        tensor, stages = run.process.tensor_parallel, len(run.stage_layers)
        shape, where = run.shape, "GPUs" if run.process.on_cuda else "CPU"
        experts = f", {shape.num_experts} experts in {shape.num_expert_layers} layers" if shape.num_experts else ""
        experts += f" of latents of {shape.expert_latent}" if shape.expert_latent else ""
        return {
            "model": f"{(num_parameters(shape) + expert_parameters(shape)) / 1e9:.3g} G parameters, "
            f"{shape.num_layers} layers of {shape.hidden}, vocabulary {shape.vocab}{experts}; "
            f"{str(args.params_dtype).removeprefix('torch.')}",
            "processes": f"{args.world_size:,} = {tensor} tensor-parallel x {stages} stages x {run.cluster.num_ranks} "
            f"HDP ranks, of up to {run.cluster.tokens_per_rank:,} tokens each; {where}",
            "features": ", ".join(f"{one.name} ({one.flag})" for one in features.enabled(args)),
            **choice_text(run.decision),
        }

    def step(self, forecast: Forecast, plan: StepPlan, seconds: float) -> dict[str, str]:
        """Return figures of the plan in words; ``seconds`` is the processor time of planning."""
        run, setup, lengths, (table, slicing) = self.run, forecast.setup, plan.lengths, forecast.table(plan)
        predicted = forecast.time(table, slicing)
        bound = lower_bounds(lengths, run.cluster, forecast.stages(slicing), slicing).largest
        widths, numbers = np.unique(table.widths[table.members == 0], return_counts=True)
        by_width = (f"{number:,} on {width:,}" for width, number in zip(widths, numbers, strict=True))
        counts = table.counts
        waiting, exchange, update = (
            part / predicted.seconds for part in (predicted.idle, predicted.exposed, predicted.update)
        )
        return {
            "documents": f"{len(lengths):,} of {sum(lengths):,} tokens, the longest {max(lengths):,}",
            "on ranks": ", ".join(by_width),
            "micro-batches of a rank": f"min {counts.min()}, mean {counts.mean():.1f}, max {counts.max()}",
            "slices": str(slicing),
            "time": f"{predicted.seconds:.4g} s predicted with the costs of {cost_source(setup)}; its "
            f"passes take {predicted.makespan / bound:.3f} of the lower bound of any plan",
            "lost": f"{waiting:.1%} waiting, {exchange:.1%} in exchange and {update:.1%} in the update that do not "
            "overlap with computation",
            "planning": f"{seconds:.2f} s of one core, {_of_step(seconds / predicted.seconds)}, during training",
        }


def _of_step(share: float) -> str:
    return f"{share:.1%} of the step" if share < 1 else f"{share:,.3g} times the step"


def bytes_text(num_bytes: float) -> str:
    """Return an amount of memory in MB, GB or TB."""
    scale, unit = next((scale, unit) for scale, unit in ((1e12, "TB"), (1e9, "GB"), (0, "MB")) if num_bytes >= scale)
    return f"{num_bytes / (scale or 1e6):,.4g} {unit}"


def between_nodes(forecast: Forecast, table: ShardTable, slicing: Slicing, node: int) -> str:
    """Return the traffic of rings between nodes of ``node`` HDP ranks and their hierarchical rings, in words."""
    rank_bytes = forecast.ring_bytes(table, slicing, node) * max(forecast.setup.mesh.stage_layers)
    wide, nested = documents_on_nodes(table, node)
    return (
        f"{bytes_text(rank_bytes.sum())} of a stage, {bytes_text(rank_bytes.max())} by the rank that sends "
        f"most; {nested:,} of {wide:,} documents on several nodes in hierarchical rings"
    )


def memory_gb(forecast: Forecast, table: ShardTable, slicing: Slicing) -> list[dict[str, float]]:
    """Return the GB of each stage in a step, on its fullest HDP rank; ``total`` is device memory.

    ``update`` is shown if it decides a total. Then that total is only ``states`` and ``update``.
    """
    stages = forecast.memory(table, slicing)
    kinds = [asdict(memory.device) | {"host": memory.host, "pages": memory.pages} for memory in stages]
    for memory, parts in zip(stages, kinds, strict=True):
        parts["update"] *= memory.device.peaks_in_update
    shown = [name for name in kinds[0] if name in ("states", "activations") or any(memory[name] for memory in kinds)]
    return [
        {"stage": stage, "layers": layers, **{name: parts[name] / 1e9 for name in shown}, "total": whole}
        for stage, (layers, parts, whole) in enumerate(
            zip(forecast.setup.mesh.stage_layers, kinds, (memory.device.total / 1e9 for memory in stages), strict=True)
        )
    ]


def choice_text(decision: Decision) -> dict[str, str]:
    """Return the choice of model states, and the rest of ``--device-memory-gb`` for activations, in words."""
    left = remaining_text(decision).partition("device memory ")[2]
    rows = {"device memory": left} if left else {}
    if decision.states is None:
        return rows
    chosen, others = (line.partition("states auto")[2] for line in decision.states.described().splitlines())
    return {**rows, "model states": chosen.strip(), "or": others.removeprefix(", ")}


def resolve_launch(flags: Sequence[str], num_ranks: int, rank: int, ranks_per_node: int, on_cpu: bool) -> Launch:
    """Resolve a launch line as rank ``rank`` of ``num_ranks``, and make Megatron's groups. Call it once in a process.

    Args:
        flags: flags of the training.
        num_ranks: ranks of the training.
        rank: rank that this process stands for.
        ranks_per_node: ranks of a node.
        on_cpu: whether the training runs on CPU; else on GPUs, which this machine need not have.

    Raises:
        ValueError: flags that the training refuses, or a training without documents.
    """
    local = min(ranks_per_node, num_ranks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(local))
    args = parse(["bytescale dry-run", *flags], on_cpu, _settle, named_or_installed(flags))
    vars(args).update(fake_process_group=True, use_gloo_process_groups=False)  # after the checks of a real training
    run = resolve(args)
    initialize._initialize_distributed(None, None, None)
    return Launch(args, run)


def _settle(args: Any) -> None:
    """Write no files. Raises ValueError for a training without documents."""
    if not args.hybrid_data_parallel:
        raise ValueError("a dry run plans documents: add --hybrid-data-parallel and --hdp-tokens-per-rank")
    vars(args).update(dict.fromkeys(WRITTEN))


def groups_of_this_process() -> dict[str, list[int]]:
    """Return the ranks of Megatron's groups that include this rank, by name."""
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
