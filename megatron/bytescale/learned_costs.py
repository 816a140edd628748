"""Learns costs while training: after each step, in the log, in checkpoints and as a cost file."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict

import torch
import torch.distributed as dist
from megatron.training.utils import print_rank_0

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.measure.learning import CostLearner, MeasuredPass, learned_line, learner_of_state, state_of
from bytescale_ext.plan.cost.learned import LearnedCosts, Learner
from bytescale_ext.plan.setup.costs import cost_of_file, stage_costs
from megatron.bytescale.arguments.options import override_current
from megatron.bytescale.runtime import Runtime

FILE = "learned_costs.json"
"""Cost file in ``--hdp-log-dir``."""

_NEWS = 0.1  # the log names factors that changed by more than this share


def learner_of(runtime: Runtime) -> CostLearner:
    """Return the learner of a process before its first step."""
    setup, process = runtime.run.decision.setup, runtime.run.process
    learner = Learner.new(setup.cluster.num_ranks, setup.mesh.num_stages)
    return CostLearner(
        stage_costs(setup)[process.stage], learner, process.hdp_rank, runtime.hdp.plan_ahead, process.stage
    )


def learn_costs(runtime: Runtime) -> None:
    """Learn from the step that has just ended. Collective at agreed steps; the sums are ready one step later.

    Nothing is learned from a step with groups that share a prompt, because the plan does not say how much they attend.
    """
    learner, batch, clock = runtime.parts.learner, runtime.step.batch, runtime.parts.clock
    if learner is None:
        return
    assert batch is not None, f"{batch=}"
    passes = [
        MeasuredPass(index, kind == "backward", seconds)
        for kind in ("forward", "backward")
        for index, seconds in clock.pass_seconds(kind).items()
        if not batch.shares_prompts
    ]
    learner.add(batch.plan, passes, runtime.slicing.num_slices)
    learned = learner.end_step(batch.step_index, runtime.device)
    _write_costs(runtime, learner.learner.costs)
    if learned is None:
        return
    override_current({"hdp_learned_costs": state_of(learner.learner, hardware_of(runtime))})
    if is_news(learned, runtime.log.costs):
        print_rank_0(learned_line(learned))
        runtime.log.costs = learned


def is_news(learned: LearnedCosts, named: LearnedCosts) -> bool:
    """Return whether speeds changed, or a factor changed much, since the log named costs."""
    pairs = zip(learned.factors, named.factors, strict=True)
    return learned.speeds != named.speeds or any(abs(new / old - 1.0) > _NEWS for new, old in pairs)


def figures_of_costs(runtime: Runtime) -> dict[str, object]:
    """Return the learned costs for metrics.jsonl; without learning nothing."""
    learner = runtime.parts.learner
    return {} if learner is None else {"learned_costs": asdict(learner.learner.costs)}


def _write_costs(runtime: Runtime, costs: LearnedCosts) -> None:
    """Write costs that changed as cost files, on the rank that writes the log.

    If a file cannot be written, print a warning and let training continue.
    """
    if costs == runtime.log.written_costs or dist.get_rank() != dist.get_world_size() - 1:
        return
    runtime.log.written_costs = costs
    log_dir, file = runtime.hdp.log_dir, runtime.hdp.learned_costs
    for path in (None if log_dir is None else log_dir / FILE, file):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_cost(path, costs.of_model(cost_of_file(runtime.run.decision.setup), hardware_of(runtime)))
        except OSError as error:
            print(f"warning: {path} is not written ({error.strerror}); training continues", file=sys.stderr)


def restore_costs(runtime: Runtime, state: Mapping[str, object] | None) -> None:
    """Continue with the learned costs of a checkpoint. On other ranks or hardware the speeds of ranks are dropped."""
    learner = runtime.parts.learner
    if learner is None or state is None:
        return
    restored, text = learner_of_state(state, learner.learner, hardware_of(runtime))
    learner.restore(restored)
    print_rank_0(f"> bytescale: {text or 'costs and speeds of ranks continue as learned before'}")


def hardware_of(runtime: Runtime) -> str:
    """Return the name of the device."""
    return torch.cuda.get_device_name() if runtime.run.process.on_cuda else "CPU"
