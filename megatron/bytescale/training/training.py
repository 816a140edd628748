"""Wraps Megatron's log line and its check of a checkpoint's arguments."""

from __future__ import annotations

import inspect
import socket
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.training import get_tensorboard_writer, get_wandb_writer
from megatron.training.utils import print_rank_0, print_rank_last

from bytescale_ext.config.logits import LogitConfig
from bytescale_ext.measure.metrics import IntervalMetrics, RankStep, append_jsonl
from bytescale_ext.measure.progress import Progress, peak_flops
from bytescale_ext.measure.stragglers import Straggler, find_stragglers, stragglers_line
from megatron.bytescale.arguments.options import current, options_of, override_current
from megatron.bytescale.arguments.running import Batches, SampleKind, SavedFolders, SavedOrder, SavedRun
from megatron.bytescale.checkpoints import remove_links
from megatron.bytescale.learned_costs import figures_of_costs, restore_costs
from megatron.bytescale.runtime import LogState, Runtime, Totals


def wrap_training_log(original: Callable[..., object], runtime: Runtime) -> Callable[..., object]:
    """Print our log line after Megatron's: tokens/s, micro-batches, imbalance, padding, time waited for plans.

    Megatron calls it after each step and before a save. So if steps count tokens, this is where Megatron's count of
    samples is replaced by the count of documents.
    """

    signature = inspect.signature(original)

    def training_log(*args: object, **kwargs: object) -> object:
        given = signature.bind(*args, **kwargs).arguments
        iteration = given["iteration"]
        totals = runtime.log.totals
        if totals.step_started is not None:
            totals.seconds += time.perf_counter() - totals.step_started
            totals.step_started = None
        if runtime.hdp.global_tokens is not None:  # Megatron has added --global-batch-size
            batches = current(Batches)
            consumed = batches.consumed_train_samples + totals.step_samples - batches.global_batch_size
            override_current({"consumed_train_samples": consumed})
        override_current({"hdp_tokens_so_far": runtime.log.tokens_so_far})
        add_losses(totals, given["loss_dict"], is_skipped=bool(given["skipped_iter"]))
        result = original(*args, **kwargs)
        _remove_planted_links(iteration)
        if iteration % runtime.run.process.log_interval == 0 and totals.num_steps:
            metrics = collect(runtime, iteration)
            write_figures(runtime, metrics, progress(runtime, totals, metrics, given), mean_losses(totals))
        return result

    return training_log


def _remove_planted_links(iteration: int) -> None:
    """Remove links that the save of an iteration would follow. Rank 0 does it, in the folder of all ranks."""
    if torch.distributed.get_rank() == 0:
        for folder in current(SavedFolders).paths():
            for link in remove_links(folder, iteration):
                print_rank_0(f"WARNING: removed {link}, a link that Megatron's save would have followed")


def add_losses(totals: Totals, losses: Mapping[str, torch.Tensor], *, is_skipped: bool) -> None:
    """Add the losses of a step to the sums of its log interval, without reading the device.

    Args:
        totals: sums of the interval.
        losses: losses of this step, each [] or [1].
        is_skipped: whether this step updated nothing; then its losses count only if no other step has losses.
    """
    if is_skipped and totals.losses:
        return
    if not is_skipped and not totals.num_updates:
        totals.losses = {}
    for name, value in losses.items():
        totals.losses[name] = totals.losses.get(name, 0) + value.detach().sum()
    totals.num_updates += not is_skipped


def mean_losses(totals: Totals) -> dict[str, float]:
    """Return the mean of each loss over the log interval. Reads the device."""
    return {name: float(value) / max(1, totals.num_updates) for name, value in totals.losses.items()}


def collect(runtime: Runtime, iteration: int) -> IntervalMetrics:
    """Gather every HDP rank's figures since the last log line, and reset them.

    Collective on the pipeline group, then on dp x cp; the first call also on all processes.
    """
    if not runtime.log.hosts:
        hosts = [""] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(hosts, socket.gethostname())
        runtime.log.hosts = tuple(hosts)
    totals = runtime.log.totals
    pace = torch.distributed.get_rank(), runtime.log.pace.seconds_per_work()
    size = len(totals.figures.values())
    stages = _gather(runtime, (*totals.figures.values(), *pace), parallel_state.get_pipeline_model_parallel_group())
    figures = RankStep.of_stages([RankStep(*row[:size]) for row in stages])
    paces = [number for row in stages for number in row[size:]]  # rank and pace on each stage
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    rows = _gather(runtime, (*figures.values(), *paces), group)
    ranks = [RankStep(*row[:size]) for row in rows]
    metrics = IntervalMetrics.of(iteration, totals.num_steps, totals.seconds, ranks)
    slow: tuple[Straggler, ...] = ()
    for column in range(size, size + len(paces), 2):  # paces are comparable only within a stage, with equal layers
        slow += find_stragglers({int(row[column]): row[column + 1] for row in rows}, runtime.log.hosts)
    runtime.log.totals = Totals()
    return replace(
        metrics,
        predicted_over_measured=compare_times(runtime.log, totals, max(rank.pass_seconds for rank in ranks)),
        stragglers=slow,
        active_experts=totals.active_experts / totals.num_steps,
        stale_steps=totals.stale_steps / totals.num_steps,
        most_stale_steps=float(totals.most_stale_steps),
    )


def compare_times(log: LogState, totals: Totals, pass_seconds: float) -> float:
    """Return the predicted over the measured time of an interval's steps; 0 on ranks that predict nothing.

    The prediction of a step is the predicted seconds of its passes, plus the median seconds that the steps of earlier
    intervals took outside of passes. The first interval adds the forecast's optimizer update instead.

    Args:
        log: state of the log, which remembers the seconds outside of passes.
        totals: figures of the interval.
        pass_seconds: measured seconds from the first to the last pass of each step, in sum, of the slowest rank.
    """
    rests, num_steps = log.rests, totals.num_steps
    update = num_steps * statistics.median(rests) if rests else totals.predicted_update
    rests.append(max(0.0, totals.seconds - pass_seconds) / num_steps)
    return (totals.predicted_passes + update) / max(totals.seconds, 1e-9) if totals.predicted_passes else 0.0


def _gather(runtime: Runtime, mine: Sequence[float], group: torch.distributed.ProcessGroup) -> list[list[float]]:
    """Gather a list of numbers from every process of the group; all lists have the same length."""
    values = torch.tensor(mine, dtype=torch.float64, device=runtime.device)
    everyones = values.new_empty((group.size(), len(mine)))
    torch.distributed.all_gather(list(everyones.unbind()), values, group=group)
    rows: list[list[float]] = everyones.tolist()  # one read of the device
    return rows


def progress(runtime: Runtime, totals: Totals, metrics: IntervalMetrics, given: Mapping[str, Any]) -> Progress:
    """Return the run's progress. ``given``: the arguments of Megatron's ``training_log`` by name."""
    process = runtime.run.process
    step_seconds = totals.seconds / totals.num_steps
    peak = peak_flops(torch.cuda.get_device_name()) if process.on_cuda else None
    world_size = torch.distributed.get_world_size()
    return Progress(
        step_seconds=step_seconds,
        loss=next((float(value) for value in given["loss_dict"].values()), None),
        learning_rate=given["learning_rate"],
        gradient_norm=None if given["grad_norm"] is None else float(given["grad_norm"]),
        tokens_so_far=runtime.log.tokens_so_far,
        eta_seconds=max(0, process.train_iters - metrics.iteration) * step_seconds,
        mfu=None if peak is None else totals.model_flops / totals.seconds / world_size / peak,
        max_attention_logit=None if runtime.run.find(LogitConfig) is None else float(given["max_attention_logit"]),
    )


def write_figures(runtime: Runtime, metrics: IntervalMetrics, run: Progress, losses: dict[str, float]) -> None:
    """Print both log lines and write metrics.jsonl and TensorBoard and W&B scalars, on the last rank like Megatron.

    A figure of a feature that is off keeps its default value and is not written as a scalar.
    """
    print_rank_last(metrics.line())
    print_rank_last(run.line())
    if metrics.stragglers:
        print_rank_last(stragglers_line(metrics.stragglers))
    if torch.distributed.get_rank() != torch.distributed.get_world_size() - 1:
        return
    scalars = {f"hdp/{name}": value for name, value in {**metrics.scalars(), **run.scalars()}.items()}
    write_scalars(scalars, metrics.iteration)
    if runtime.hdp.log_dir is not None:
        append_jsonl(
            runtime.hdp.log_dir / "metrics.jsonl",
            [{**asdict(metrics), **run.scalars(), **losses, **figures_of_costs(runtime)}],
        )


def write_scalars(scalars: dict[str, float], iteration: int) -> None:
    """Write figures of an iteration to TensorBoard and W&B, which Megatron opens only on the last rank."""
    if writer := get_tensorboard_writer():
        for name, value in scalars.items():
            writer.add_scalar(name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log(scalars, iteration)


def wrap_check_checkpoint_args(original: Callable[..., object], runtime: Runtime) -> Callable[..., object]:
    """Restore what a checkpoint recorded of a run, and warn if samples of another kind were consumed before.

    The record contains learned costs, the count of tokens and the order of samples.

    A kind is documents, windows, or windows of another file. Megatron calls the function when it restores a
    checkpoint's counters, which it does not do with ``--finetune``.
    """

    def check_checkpoint_args(saved: Namespace, *args: object, **kwargs: object) -> object:
        before, now = options_of(saved, SampleKind), current(SampleKind)
        if before.consumed_train_samples and str(before) != str(now):
            print_rank_0(
                f"WARNING: the checkpoint counts {before.consumed_train_samples:,} {before}; they count as {now} from "
                "now on, and data and learning-rate schedule continue after them. Add --finetune to start a new run "
                "with its weights (docs/guide/recipes.md)."
            )
        run = options_of(saved, SavedRun)
        restore_costs(runtime, run.hdp_learned_costs)
        tokens = run.hdp_tokens_so_far
        runtime.log.tokens_so_far = tokens if isinstance(tokens, int) and tokens > 0 else 0
        if before.consumed_train_samples and str(before) == str(now):
            override_current({"hdp_shuffle_limit": options_of(saved, SavedOrder).hdp_shuffle_limit})
        return original(saved, *args, **kwargs)

    return check_checkpoint_args
