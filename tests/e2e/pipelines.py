"""Trainings that print the schedule of each pipeline stage, and their comparison with one process of stock Megatron."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.plan.step.placed import PlacedRanks
from bytescale_ext.plan.step.plan import StepPlan
from tests.e2e.once import once
from tests.e2e.oracle import draw_weights_by_name, relative_error, shard_of, train_documents_one_by_one
from tests.e2e.training import MODEL, TRAIN, Outcome, name_of, train_ranks

TOLERANCE = 1e-5
STEPS = 3
LAYERS = ["--num-layers", 4, "--train-iters", STEPS]
ONE_BY_ONE = ["--micro-batch-size", 1, "--calculate-per-token-loss"]
BALANCE = "--hdp-balance none --hdp-tokens-per-rank 128".split()
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
UNALIGNED = [*SHARDED, "--no-align-grad-reduce"]
PP2 = "--pipeline-model-parallel-size 2".split()
VIRTUAL = "--num-virtual-stages-per-pipeline-rank 2".split()
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
SELECTIVE = ["--recompute-granularity", "selective"]
LAYOUT = "--pipeline-model-parallel-layout E|t|t||t||t|L --no-overlap-p2p-communication".split()
UNEVEN = "--decoder-first-pipeline-num-layers 3".split()
Expected = tuple[list[float], dict[str, torch.Tensor]]  # losses, and gradients of the first step


@dataclass(frozen=True)
class Layout:
    """Ranks of a run, and the flags that lay the model out over them."""

    num_ranks: int
    flags: list[str] = field(default_factory=list)
    num_stages: int = 1
    tp_size: int = 1


def train_and_record(num_idle: int = 0) -> None:
    """Entry with weights drawn by name that records the passes of each stage. The last ranks have no tokens."""
    import pretrain_gpt_hdp

    plan_once(num_idle)
    record_actions()
    draw_weights_by_name()
    pretrain_gpt_hdp.main()


def plan_once(num_idle: int) -> None:
    """Make each plan on one rank and read it on the others. The last ``num_idle`` ranks have no tokens.

    Planning for pipelines takes as long as training here. Equal lengths give equal plans, as ``tests/plan`` proves;
    ``test_agreement.py`` tests different plans.
    """
    from bytescale_ext.plan.hdp.planner import HdpPlanner

    plan = HdpPlanner.__call__

    def plan_or_read(planner: HdpPlanner, lengths: Any, should_stop: Any = None) -> StepPlan:
        assert should_stop is None
        num_ranks = planner.cluster.num_ranks
        smaller = replace(planner, cluster=replace(planner.cluster, num_ranks=num_ranks - num_idle))
        made = once(lambda _: plan(smaller, lengths), "plan", smaller, tuple(lengths))
        assert isinstance(made.ranks, PlacedRanks)
        return replace(made, num_ranks=num_ranks, ranks=replace(made.ranks, num_ranks=num_ranks))

    HdpPlanner.__call__ = plan_or_read  # type: ignore[method-assign]


def train_one_by_one() -> None:
    """Entry of the oracle with the same weights."""
    draw_weights_by_name()
    train_documents_one_by_one()


def record_actions() -> None:
    """Print each step's plan, the passes of Megatron's schedule on this stage, and the input of its FLOP counter."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from megatron.bytescale.core.pipeline_parallel import schedules as ours
    from megatron.bytescale.core.tensor_parallel.weight_gradients import WeightGradients
    from megatron.bytescale.registry import Installation

    install = Installation.install
    forward_step, backward_step = schedules.forward_step, schedules.backward_step
    run_weights, written = WeightGradients.run, note_swapped_keys()
    end_step, consume = ours.end_step, training.consume_seqlen_stats_in_iteration
    done: list[tuple[str, int, int]] = []
    of_output: dict[int, tuple[int, int]] = {}

    def forward_and_note(*args: Any, current_microbatch: int = 0, vp_stage: int | None = None, **kwargs: Any) -> Any:
        result = forward_step(*args, current_microbatch=current_microbatch, vp_stage=vp_stage, **kwargs)
        of_output[id(result[0])] = (current_microbatch, vp_stage or 0)
        done.append(("F", *of_output[id(result[0])]))
        return result

    def backward_and_note(input_tensor: Any, output_tensor: Any, *args: Any) -> Any:
        done.append(("B", *of_output[id(output_tensor)]))
        return backward_step(input_tensor, output_tensor, *args)

    def run_and_note(gradients: WeightGradients, action: Any, is_last: bool) -> None:
        done.append(("W", action.micro_batch, action.slice_index))
        run_weights(gradients, action, is_last)

    def end_and_print(runtime: Any, training: bool) -> None:
        if training:
            print(f"SWAPPED {sum(written)}")
            k = runtime.slicing.num_slices
            rows = [(kind, *((one * k + two, 0) if kind == "W" else (one, two))) for kind, one, two in done]
            print(f"ACTIONS {json.dumps(rows)}")
            print(f"PLAN {json.dumps(runtime.step.batch.plan.to_json())}")
        done.clear()
        end_step(runtime, training)

    def consume_and_print() -> Any:
        sums = consume()
        print(f"SUMS {json.dumps(sums)}")
        return sums

    def install_and_note(*args: Any) -> None:
        install(*args)  # Megatron checks that these two are its own functions
        schedules.forward_step, schedules.backward_step = forward_and_note, backward_and_note
        WeightGradients.run = run_and_note  # type: ignore[method-assign]

    Installation.install = install_and_note
    ours.end_step = end_and_print
    training.consume_seqlen_stats_in_iteration = consume_and_print


def note_swapped_keys() -> list[bool]:
    """Return a list that records, for each part of keys that moves to host memory, whether there was room."""
    from bytescale_ext.activation.keys import SwappedKeys

    write, written = SwappedKeys._write, []

    def write_and_note(keys: SwappedKeys, tensor: torch.Tensor) -> bool:
        written.append(write(keys, tensor))
        return written[-1]

    SwappedKeys._write = write_and_note  # type: ignore[method-assign]
    return written


def printed(outcome: Outcome, name: str) -> list[Any]:
    return [json.loads(line) for line in re.findall(rf"^{name} (.*)$", outcome.text, re.MULTILINE)]


def run(
    corpus: Path, save: Path | None, num_ranks: int, flags: Iterable[object], entry: Any, model: list[str] = MODEL
) -> list[Outcome]:
    words = list(flags)
    saving = ["--save", save, "--save-wgrads-interval", 1] if save else []
    tp_size = words[words.index("--tensor-model-parallel-size") + 1] if "--tensor-model-parallel-size" in words else 1
    common = [*model, *TRAIN, *LAYERS, "--data-path", corpus, *saving,
              "--make-vocab-size-divisible-by", 128 // int(str(tp_size))]  # fmt: skip
    return train_ranks(num_ranks, *common, *words, entry=entry)


def whole_gradients(save: Path, num_stages: int, tp_size: int) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of the first step of all stages by tensor-parallel rank and name in the whole model."""
    folder = save / "wgrads" / "iter_0000001"
    return [_whole_gradients(folder, num_stages, tp_rank) for tp_rank in range(tp_size)]


def _whole_gradients(folder: Path, num_stages: int, tp_rank: int) -> dict[str, torch.Tensor]:
    names = [f"mp_rank_{tp_rank:02d}" + (f"_{stage:03d}" if num_stages > 1 else "") for stage in range(num_stages)]
    stages = [torch.load(next(iter(folder.glob(f"{name}*"))), weights_only=False, map_location="cpu") for name in names]
    num_layers, whole = 0, {}
    for chunk in range(max(map(len, stages))):
        for stage in stages:
            of_chunk = stage.get(f"model_chunk{chunk}", {})
            local = [int(found[1]) for name in of_chunk if (found := re.match(r"decoder\.layers\.(\d+)\.", name))]
            for name, gradient in of_chunk.items():
                shift = lambda found, offset=num_layers: f"layers.{int(found[1]) + offset}."  # noqa: E731
                whole[re.sub(r"(?<!mtp\.)layers\.(\d+)\.", shift, name)] = gradient
            num_layers += max(local, default=-1) + 1
    return whole


def oracle_of(
    corpus: Path, model: list[str] = MODEL, entry: Any = train_one_by_one, flags: Sequence[object] = ()
) -> Expected:
    """Return the losses and gradients of one process of stock Megatron, which runs once in a test session."""

    def train(folder: Path) -> Expected:
        (outcome,) = run(corpus, folder, 1, [*ONE_BY_ONE, *flags], entry, model)
        return outcome.losses, whole_gradients(folder, 1, 1)[0]

    return once(train, "oracle", str(corpus), model, name_of(entry), list(map(str, flags)))


def check_equals(
    expected: Expected,
    corpus: Path,
    save: Path,
    layout: Layout,
    flags: Sequence[object],
    **given: Any,
) -> list[Outcome]:
    """Train in a layout with ``run``, and compare losses and the gradients of the first step with expected values."""
    outcomes = run(corpus, save, layout.num_ranks, [*flags, *layout.flags], **{"entry": train_and_record, **given})
    assert outcomes[-1].losses == pytest.approx(expected[0], rel=TOLERANCE), outcomes[-1].text[-500:]
    check_gradients(layout, save, expected[1])
    return outcomes


def check_gradients(case: Any, save: Path, expected: dict[str, torch.Tensor]) -> None:
    """Compare the gradients of the first step from all ranks and stages with the gradients of the whole model."""
    if "--use-distributed-optimizer" in case.flags and "--no-align-grad-reduce" not in case.flags:
        return  # Megatron then keeps, and saves, only the reduced gradients of a rank's own shard
    for tp_rank, found in enumerate(whole_gradients(save, case.num_stages, case.tp_size)):
        assert {key for key in found if "_extra" not in key} == set(expected)
        for key, value in found.items():
            error = relative_error(value, shard_of(expected[key], key, value, tp_rank, case.tp_size))
            assert error < TOLERANCE, f"{key}: {error=}"
