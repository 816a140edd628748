from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.shards import ShardTable
from bytescale_ext.plan.evaluate.replay import replay_stages
from bytescale_ext.plan.evaluate.slicing_choice import full_micro_batches
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.memory.held import peak_memory
from bytescale_ext.plan.search.costed import CostedStrategy, setup_of_strategy
from bytescale_ext.plan.search.space import with_budgets
from bytescale_ext.plan.search.strategy import BLOCK, FULL, PRICED, Strategy
from bytescale_ext.plan.search.task import Devices, DoesNotFit, Task, cluster_of
from bytescale_ext.plan.setup.memory import stage_memory, stage_state_bytes
from bytescale_ext.plan.step.placed import micro_batch_counts
from bytescale_ext.plan.step.sizes import ONE_SLICE, Cluster
from tests.plan.search.tasks import COST, SHAPE, SPARSE, STEPS, small_task

WHOLE = Strategy(1, (6,), 1024, shares_optimizer=True)
PIPED = Strategy(1, (3, 3), 1024, shares_optimizer=True)
TASK = small_task()
SLICED = with_budgets(TASK, replace(PIPED, chooses_slices=True))
ALL = [
    WHOLE,
    replace(WHOLE, tensor_parallel=2),
    replace(WHOLE, activations=FULL),
    with_budgets(TASK, replace(WHOLE, activations=PRICED)),
    PIPED,
    replace(PIPED, stage_layers=(4, 2)),
    replace(PIPED, stage_layers=(4, 2), activations=BLOCK, recomputed_layers=3),
    replace(PIPED, chunks=3),
    SLICED,
    replace(SLICED, activations=PRICED),
]


@pytest.mark.slow
def test_a_step_without_pipelines_is_the_replay_of_its_plan() -> None:
    case = CostedStrategy.of(TASK, WHOLE)
    figures = case.run(STEPS[0])
    plan = HdpPlanner(Cluster(8, 1024, 4), (COST.whole(),))(STEPS[0])
    table = ShardTable.of(plan).with_counts(np.array(micro_batch_counts(plan)))
    result = replay_stages(table, (COST.whole(),))
    assert figures.seconds - figures.time.update == pytest.approx(result.makespan)
    assert figures.time.idle == pytest.approx(result.idle_share * result.makespan)
    assert figures.time.exposed == pytest.approx(result.exposed_share * result.makespan)
    assert figures.time.compute > 0


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_no_step_undercuts_its_bounds(strategy: Strategy) -> None:
    case = CostedStrategy.of(TASK, strategy)
    steps = [step[:3] for step in STEPS]
    seconds = [case.run(step).seconds for step in steps]
    bounds = [case.bound(step) for step in steps]
    assert all(np.less_equal(bounds, seconds))
    work = [(float(sum(step)), float(sum(length**2 for length in step))) for step in steps]
    assert 0 < case.least_seconds(work) <= np.mean(bounds) + 1e-12


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_memory_is_within_the_device(strategy: Strategy) -> None:
    figures = CostedStrategy.of(TASK, strategy).run(STEPS[0][:2])
    states = max(stage_state_bytes(setup_of_strategy(TASK, strategy)))
    assert states < figures.device_bytes <= TASK.devices.memory_bytes


def test_full_micro_batches_take_the_activations_of_all_layers() -> None:
    case = CostedStrategy.of(TASK, WHOLE)
    memory, kept = stage_memory(case.forecast.setup), 1024 * COST.layer_bytes * SHAPE.num_layers
    assert case.full_bytes[0] == pytest.approx(memory.state_bytes[0] + memory.working_bytes[0] + kept)
    piped = CostedStrategy.of(TASK, PIPED)  # the first stage has two micro-batches in flight
    table = full_micro_batches(8, 1024)
    memory = stage_memory(piped.forecast.setup)
    of_schedule = peak_memory(table, ONE_SLICE, COST.whole().both, memory).device_bytes(memory)
    assert piped.full_bytes[0] == pytest.approx(of_schedule)
    kept = 2 * 1024 * COST.layer_bytes * 3
    assert piped.full_bytes[0] == pytest.approx(memory.state_bytes[0] + memory.working_bytes[0] + kept)


def test_full_recompute_takes_less_memory_and_longer() -> None:
    plain, full = (CostedStrategy.of(TASK, strategy) for strategy in (WHOLE, replace(WHOLE, activations=FULL)))
    assert full.full_bytes[0] < plain.full_bytes[0]
    assert full.run(STEPS[0]).time.compute > 1.2 * plain.run(STEPS[0]).time.compute


def test_a_policy_recomputes_only_what_does_not_fit() -> None:
    roomy = with_budgets(TASK, replace(WHOLE, activations=PRICED))
    assert CostedStrategy.of(TASK, roomy).run(STEPS[0]).time.compute == pytest.approx(
        CostedStrategy.of(TASK, WHOLE).run(STEPS[0]).time.compute
    )
    case = CostedStrategy.of(TASK, WHOLE)
    tight = small_task(memory_bytes=case.full_bytes[0] - 3e6)
    with pytest.raises(DoesNotFit, match="device memory") as error:
        CostedStrategy.of(tight, WHOLE)
    assert error.value.needed_bytes == case.full_bytes[0]
    priced = with_budgets(tight, replace(WHOLE, activations=PRICED))
    figures = CostedStrategy.of(tight, priced).run(STEPS[0])
    assert figures.device_bytes <= tight.devices.memory_bytes
    assert figures.time.compute > CostedStrategy.of(TASK, WHOLE).run(STEPS[0]).time.compute


def test_reasons_besides_memory() -> None:
    for strategy, reason in (
        (replace(WHOLE, tensor_parallel=3), "ranks"),
        (replace(WHOLE, tensor_parallel=16), "ranks"),
        (replace(WHOLE, tokens_per_rank=256), "context"),
    ):
        with pytest.raises(DoesNotFit, match=reason):
            cluster_of(TASK, strategy)
    odd = Task(COST, TASK.devices, 4096, tuple(step[:6] for step in STEPS))
    with pytest.raises(DoesNotFit, match="documents"):
        cluster_of(odd, WHOLE)


def test_virtual_stages_run_groups_of_micro_batches() -> None:
    case = CostedStrategy.of(TASK, replace(PIPED, chunks=3))
    stages = case.forecast.stages(ONE_SLICE)
    assert len(stages) == 6
    assert sum(stage.both.b for stage in stages) == pytest.approx(COST.whole().both.b)
    assert case.run(STEPS[0]).seconds > 0


@pytest.mark.parametrize("strategy", [PIPED, SLICED])
def test_each_message_between_stages_takes_its_latency(strategy: Strategy) -> None:
    """Fill and drain have at least one message in each direction, for slices of any size."""
    latency = 1.0
    slow = replace(TASK, cost=replace(COST, latency=latency))
    figures = [CostedStrategy.of(task, strategy).run(STEPS[0]) for task in (TASK, slow)]
    assert figures[1].seconds >= figures[0].seconds + 2 * (strategy.num_stages - 1) * latency * 0.999
    assert figures[1].time.compute == pytest.approx(figures[0].time.compute, rel=0.05)
    alone = [CostedStrategy.of(task, WHOLE).run(STEPS[0]) for task in (TASK, slow)]
    assert alone[0] == alone[1], "one stage sends no messages"


def test_slices_are_those_of_training() -> None:
    case = CostedStrategy.of(TASK, SLICED)
    choice = case.planner.choice
    assert choice is not None
    plan = case.planner(STEPS[0][:3])
    assert plan.slicing in {replace(one, kept_tokens=plan.slicing.kept_tokens, summed_tokens=plan.slicing.summed_tokens)
                            for one in choice.options} if plan.slicing else False  # fmt: skip


def test_shared_experts_take_less_memory_and_wait_for_each_other() -> None:
    task = replace(TASK, cost=replace(COST, shape=SPARSE))
    apart, shared = (CostedStrategy.of(task, replace(WHOLE, expert_parallel=ranks)) for ranks in (1, 4))
    dense = SPARSE.hidden * 3 * SPARSE.ffn_hidden  # an expert is as wide as the MLP of the dense model
    saved = 6 * 8 * dense * (1 - 1 / 4) * (2 + 4)  # parameters and gradients; optimizer states are shared in both cases
    states = [stage_state_bytes(case.forecast.setup)[0] for case in (apart, shared)]
    assert states[0] - states[1] == pytest.approx(saved)
    assert shared.planner.needs_aligned
    assert not apart.planner.needs_aligned
    figures = shared.run(STEPS[0])
    assert figures.time.compute > 0
    assert shared.bound(STEPS[0]) <= figures.seconds
    with pytest.raises(DoesNotFit, match="experts"):
        cluster_of(task, replace(WHOLE, expert_parallel=3))


@pytest.mark.parametrize("strategy", ALL, ids=str)
def test_no_step_takes_more_than_full_micro_batches(strategy: Strategy) -> None:
    case = CostedStrategy.of(TASK, strategy)
    for step in (STEPS[0], (16,) * 8):
        found = case.step_bytes(step)
        assert max(stage_state_bytes(case.forecast.setup)) < found
        if not strategy.chooses_slices and strategy.activations != PRICED:
            assert found <= case.full_bytes[0] * (1 + 1e-9)


@pytest.mark.parametrize("strategy", [WHOLE, PIPED, replace(PIPED, stage_layers=(4, 2))], ids=str)
def test_full_micro_batches_take_what_the_search_assumes(strategy: Strategy) -> None:
    """A document on all ranks fills the micro-batches.

    Without a second document, a stage has one micro-batch in flight.
    """
    case = CostedStrategy.of(TASK, strategy)
    document = case.forecast.setup.cluster.num_ranks * 1024
    assert case.step_bytes((document,) * 4) == pytest.approx(case.full_bytes[0])
    one_less = (strategy.num_stages - 1) * 1024 * COST.layer_bytes * strategy.stage_layers[0]
    less = case.full_bytes[0] - case.step_bytes((document,))
    assert 0.8 * one_less <= less <= one_less + 1, "the last stage may then be the fullest"


@pytest.mark.slow
def test_a_policy_without_work_takes_what_layers_take_that_keep_all() -> None:
    plain, policy = (CostedStrategy.of(TASK, one) for one in (WHOLE, replace(WHOLE, activations=PRICED, device_gb=1e3)))
    assert policy.forecast.whole is not None
    assert policy.forecast.whole.keeps_all
    assert policy.step_bytes(STEPS[0]) == plain.step_bytes(STEPS[0])
    sliced = replace(SLICED, device_gb=1e3)
    plain, policy = (CostedStrategy.of(TASK, one) for one in (sliced, replace(sliced, activations=PRICED)))
    assert policy.step_bytes(STEPS[0]) > 0 < plain.step_bytes(STEPS[0])


def test_slow_devices_slow_the_ranks_that_they_are_in() -> None:
    """Tensor-parallel ranks are neighbours; the stages of a pipeline are as far apart as possible."""
    devices = Devices(8, 4, 1e9, speeds=(1.0,) * 6 + (0.5, 0.5))
    assert devices.rank_speeds(1, 1) == devices.speeds
    assert devices.rank_speeds(1, 2) == (1.0, 1.0, 1.0, 0.5)
    assert devices.rank_speeds(2, 1) == (1.0, 1.0, 0.5, 0.5)
    assert devices.rank_speeds(2, 2) == (1.0, 0.5)
    assert devices.rank_speeds(8, 1) == (0.5,)
    assert replace(devices, speeds=(1.0,) * 8).rank_speeds(1, 1) == ()
    for speeds in ((1.0,) * 7, (1.0,) * 7 + (0.0,), (1.0,) * 7 + (float("nan"),)):
        with pytest.raises(ValueError, match="8 positive numbers"):
            replace(devices, speeds=speeds)
