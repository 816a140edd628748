"""Loads of experts in training: counts them, gathers them after each step, records them, and adapts placements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.training.utils import print_rank_0, print_rank_last

from bytescale_ext.config.experts import PlacementConfig, TraceTo
from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.remote import RemoteConfig
from bytescale_ext.data.loading.loads import LoadHistory
from bytescale_ext.measure.metrics import append_jsonl
from bytescale_ext.plan.experts.check import check_placement
from bytescale_ext.plan.experts.cost import balance_ratio
from bytescale_ext.plan.experts.placement import Ints, PlacementPlan, home_parts
from megatron.bytescale.arguments.running import running_step
from megatron.bytescale.core.transformer.moe.counted_layer import TokenCounts, with_counts
from megatron.bytescale.core.transformer.moe.placed_layer import Placements, with_slots
from megatron.bytescale.features.experts.build import FetchAhead
from megatron.bytescale.features.experts.speeds import measured_placement_cost
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.training import write_scalars

RATIO_PARTS: Final = 1 << 20
"""Denominator of ratios, which are summed over ranks as integers."""


@dataclass(frozen=True)
class StepLoads:
    """The tokens that ranks have sent to their shared experts in a step.

    Attributes:
        by_layer: layer number -> loads [ranks, experts], for the layers of this stage.
        num_passes: number of this rank's forward passes through each layer.
    """

    by_layer: dict[int, Ints]
    num_passes: int


def count_tokens(training: Training, runtime: Runtime, at_step_end: Callable[[StepLoads], None]) -> Training:
    """Count tokens in each layer of experts, and call ``at_step_end`` with the loads of each step."""
    if runtime.parts.expert_counts is not None:
        runtime.parts.expert_counts.at_step_end.append(at_step_end)
        return training
    counts = TokenCounts(at_step_end=[at_step_end])
    runtime.add_parts(expert_counts=counts)

    def tell() -> None:
        loads = step_loads(counts)
        for action in counts.at_step_end:
            action(loads)

    return after_steps(training.wrap_all_layer_specs(partial(with_counts, counts=counts), runtime), tell)


def after_steps(training: Training, act: Callable[[], None]) -> Training:
    """Call ``act`` after the gradients of each step are reduced."""

    def wrap_finalize(finalize: Callable[..., object]) -> Callable[..., object]:
        def finalize_and_act(*args: object, **kwargs: object) -> object:
            result = finalize(*args, **kwargs)
            act()
            return result

        return finalize_and_act

    return training.wrap_finalize(wrap_finalize)


def step_loads(counts: TokenCounts) -> StepLoads:
    """Return the step's loads. Collective on the ranks that share experts if the stage has experts."""
    num_passes = counts.num_passes
    layers, mine = counts.take()
    if mine is None:
        return StepLoads({}, 0)
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    torch.distributed.all_gather(everyones, mine, group=group)
    num_ranks = parallel_state.get_expert_model_parallel_world_size()
    loads = torch.stack(everyones).view(num_ranks, -1, *mine.shape).sum(1).cpu().numpy().astype(np.int64)
    return StepLoads({layer: loads[:, number] for number, layer in enumerate(layers)}, num_passes)


def record_loads(training: Training, runtime: Runtime) -> Training:
    """Write the loads of each step to the file of ``--moe-placement-trace``."""
    return count_tokens(training, runtime, partial(record, runtime.run.get(TraceTo)))


def record(target: TraceTo, loads: StepLoads) -> None:
    """Write the loads of all stages. Collective on the writer's pipeline group."""
    group = parallel_state.get_expert_tensor_and_model_parallel_group()
    if parallel_state.get_expert_data_parallel_rank() or group.rank():
        return
    stages: list[dict[int, Ints]] = [{}] * parallel_state.get_pipeline_model_parallel_world_size()
    group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.all_gather_object(stages, loads.by_layer, group=group)
    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        rows: list[dict[str, object]] = [{"step": running_step() + 1}]
        rows[0]["loads"] = {str(layer): load.tolist() for of_stage in stages for layer, load in of_stage.items()}
        if not target.path.exists() or not target.path.stat().st_size:
            rows.insert(0, asdict(target.head))
        append_jsonl(target.path, rows)


def follow_loads(training: Training, runtime: Runtime) -> Training:
    """Keep experts in slots, and place replicas by the loads of recent steps."""
    config = runtime.run.get(PlacementConfig)
    placements = Placements(PlacementPlan.static(config.num_experts, config.num_ranks, config.placing.num_slots))
    follower = Follower(config, placements, runtime.run.process.log_interval)
    hdp = runtime.run.find(HdpConfig)
    if hdp is not None and runtime.run.find(RemoteConfig) is None:  # Ray's actor plans without feedback
        history = LoadHistory.planned_ahead(hdp.plan_ahead)
        runtime.add_parts(load_history=history)
        training = count_tokens(training, runtime, Feedback(runtime, placements, history))
    if config.measures:
        training.model.pre_wrap_hooks.append(partial(measure, runtime, follower))
    training = count_tokens(training, runtime, follower)
    print_rank_0(
        f"> bytescale: {config.placing.num_slots} slots of each rank for {config.num_experts} experts on "
        f"{config.num_ranks} ranks, placement {config.placing.placement}"
    )
    training = after_steps(training, (ahead := FetchAhead(placements)).forget)
    timeout_minutes = runtime.run.process.timeout_minutes
    training.model.pre_wrap_hooks.append(partial(ahead.join, device=runtime.device, timeout_minutes=timeout_minutes))
    training = training.wrap_all_layer_specs(partial(with_slots, placements=placements), runtime)
    return training.wrap_forward_step(ahead.wrap)


def measure(runtime: Runtime, follower: Follower, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: measure the costs for placements. Collective over all processes."""
    cost, text = measured_placement_cost(runtime, model_chunks)
    follower.config = follower.config.with_cost(cost)
    print_rank_last(f"> bytescale: placement of experts, {text}")
    return model_chunks


@dataclass
class Feedback:
    """Reports each step's imbalance of experts, under its placement, to the planner of later steps.

    Attributes:
        runtime: runtime of this process.
        placements: placements that the layers followed.
        history: record that the planner reads.
    """

    runtime: Runtime
    placements: Placements
    history: LoadHistory

    def __call__(self, loads: StepLoads) -> None:
        """Record the load of a step, as the mean over all layers and groups of ranks. Collective over all processes."""
        ratios = [balance_ratio(self.placements.of(layer).parts(), load) for layer, load in loads.by_layer.items()]
        counted = [round(RATIO_PARTS * sum(ratios)), len(ratios)]  # integers, so that the sums are equal on all ranks
        sums = torch.tensor(counted, dtype=torch.int64, device=self.runtime.device)
        torch.distributed.all_reduce(sums)
        total, count = sums.tolist()
        if count:
            self.history.add(running_step(), total / count / RATIO_PARTS)


class Follower:
    """Plans the placements of this process's layers from the loads of each step; equal on all ranks that share experts.

    Attributes:
        config: settings of placement; its cost is replaced once when it is measured.
        placements: receiver of the plans.
        log_interval: steps between log lines.
        summed: layer number -> loads since its last plan.
        ratios: pairs of the balance as placed and the balance without replicas, since the last log line.
        num_moves: number of new replicas since the last log line.
    """

    def __init__(self, config: PlacementConfig, placements: Placements, log_interval: int) -> None:
        self.config, self.placements, self.log_interval = config, placements, log_interval
        self.summed: dict[int, Ints] = {}
        self.ratios: list[tuple[float, float]] = []
        self.num_moves = 0

    def __call__(self, loads: StepLoads) -> None:
        """Add the loads of a step, and make new plans at the end of each interval."""
        config, step = self.config, running_step() + 1
        homes = home_parts(config.num_experts, config.num_ranks)
        for layer, load in loads.by_layer.items():
            placed = self.placements.of(layer).parts()
            self.ratios.append((balance_ratio(placed, load), balance_ratio(homes, load)))
            self.summed[layer] = self.summed.get(layer, 0) + load
        if step % config.placing.interval == 0:
            self._plan(loads.num_passes)
        if step % self.log_interval == 0 and self.ratios:
            placed, plain = (sum(column) / len(self.ratios) for column in zip(*self.ratios, strict=True))
            print_rank_last(
                f"> bytescale: experts of the busiest rank have {placed:.3f} times the mean tokens, {plain:.3f} "
                f"without replicas; {self.num_moves} new replicas"
            )
            figures = {"balance": placed, "balance without replicas": plain, "new replicas": self.num_moves}
            write_scalars({f"experts/{name}": value for name, value in figures.items()}, step)
            self.ratios, self.num_moves = [], 0

    def _plan(self, num_passes: int) -> None:
        """Plan each layer; gradients of replicas are sent ``num_passes`` times per step, weights once."""
        placing = self.config.placing
        cost = placing.cost.with_micro_batches(num_passes)
        cost = replace(cost, copy_seconds=cost.copy_seconds * placing.interval)  # loads are sums over these steps
        planner = replace(placing, cost=cost).planner
        for layer, load in self.summed.items():
            before = self.placements.of(layer)
            plan = planner(before, load)
            check_placement(plan, self.config.num_experts, placing.num_slots)
            self.num_moves += plan.changed_slots(before)
            self.placements.by_layer[layer] = plan
        self.summed = {}
