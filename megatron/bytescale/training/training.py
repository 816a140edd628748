"""Wraps Megatron's log line."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_tensorboard_writer
from megatron.training.utils import print_rank_last

from bytescale_ext.measure.metrics import IntervalMetrics, RankStep, append_jsonl
from megatron.bytescale.runtime import Runtime, Totals


def wrap_training_log(original: Callable[..., Any], runtime: Runtime) -> Callable[..., Any]:
    """Follow Megatron's log line with ours: tokens/s, micro-batches, imbalance, padding, time waited for plans."""

    def training_log(
        loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any, **kwargs: Any
    ) -> Any:
        totals = runtime.totals
        if totals.step_started is not None:
            totals.seconds += time.perf_counter() - totals.step_started
            totals.step_started = None
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        if iteration % runtime.run.process.log_interval == 0 and totals.num_steps:
            losses = {key: float(value) for key, value in loss_dict.items()}
            report(runtime, collect(runtime, iteration), losses)
        return result

    return training_log


def collect(runtime: Runtime, iteration: int) -> IntervalMetrics:
    """Gather every HDP rank's figures since the last log line, and reset them.

    Collective, first on the pipeline group, then on dp x cp.
    """
    stages = _gather(runtime, runtime.totals.figures, parallel_state.get_pipeline_model_parallel_group())
    ranks = _gather(
        runtime, RankStep.of_stages(stages), parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    metrics = IntervalMetrics.of(iteration, runtime.totals.num_steps, runtime.totals.seconds, ranks)
    runtime.totals = Totals()
    return metrics


def _gather(runtime: Runtime, mine: RankStep, group: torch.distributed.ProcessGroup) -> list[RankStep]:
    """Return ``mine`` of every process of the group."""
    values = torch.tensor(mine.values(), dtype=torch.float64, device=runtime.device)
    everyones = [torch.empty_like(values) for _ in range(group.size())]
    torch.distributed.all_gather(everyones, values, group=group)
    return [RankStep(*row.tolist()) for row in everyones]


def report(runtime: Runtime, metrics: IntervalMetrics, losses: dict[str, float]) -> None:
    """Print the line, and write TensorBoard scalars and metrics.jsonl, on the last rank as Megatron does."""
    print_rank_last(metrics.line())
    if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return
    writer = get_tensorboard_writer()
    if writer:
        for name, value in asdict(metrics).items():
            if isinstance(value, float):
                writer.add_scalar(f"hdp/{name}", value, metrics.iteration)
    if runtime.hdp.log_dir is not None:
        append_jsonl(runtime.hdp.log_dir / "metrics.jsonl", [{**asdict(metrics), **losses}])
