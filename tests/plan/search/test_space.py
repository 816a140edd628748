from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.search.explore import Exploration, fitting_cases
from bytescale_ext.plan.search.space import (
    Space,
    balanced_stages,
    expert_sizes,
    slowest_stage_seconds,
    tensor_sizes,
    with_budgets,
)
from bytescale_ext.plan.search.strategy import FULL, KEEP, PRICED, Strategy, parse_strategy
from bytescale_ext.plan.search.task import Task, cluster_of
from tests.plan.search.tasks import COST, SHAPE, SPARSE, STEPS, small_task

TASK = small_task()


@pytest.mark.slow
def test_every_strategy_is_valid_and_none_comes_twice() -> None:
    found = list(Space().strategies(TASK))
    assert len(set(found)) == len(found) > 100
    for one in found:
        assert cluster_of(TASK, one).num_ranks * one.tokens_per_rank >= TASK.context
        assert sum(one.stage_layers) == SHAPE.num_layers
        assert parse_strategy(one.flags(), SHAPE.num_layers) == one
    for name in ("tensor_parallel", "num_stages", "tokens_per_rank", "chunks", "shares_optimizer", "chooses_slices",
                 "activations", "loss_tokens"):  # fmt: skip
        assert len({getattr(one, name) for one in found}) > (name == "loss_tokens") * 0 + (name != "loss_tokens"), name


def test_slices_and_virtual_stages_come_with_and_without_a_policy() -> None:
    pipelines = list(Space((1,), (2,), (2048,)).strategies(TASK))
    priced = [one for one in pipelines if one.activations == PRICED]
    assert {one.chooses_slices for one in priced} == {one.chooses_slices for one in pipelines} == {True, False}
    assert all(one.device_gb is not None for one in priced)
    assert {one.chunks for one in priced} == {one.chunks for one in pipelines} == {1, 3}
    assert not any(one.chooses_slices for one in pipelines if one.chunks > 1)
    whole = Space((1,), (2,), (2048,), (PRICED,), ("whole",)).strategies(TASK)
    assert not any(one.chooses_slices for one in whole)


def test_tensor_parallel_sizes_divide_groups_and_fit_a_node() -> None:
    assert tensor_sizes(TASK) == [1, 2]
    wide = replace(TASK, cost=replace(COST, shape=replace(SHAPE, num_heads=16, num_kv_heads=16)))
    assert tensor_sizes(wide) == [1, 2, 4]
    assert tensor_sizes(replace(wide, devices=replace(TASK.devices, count=2))) == [1, 2]


def test_only_what_training_takes_is_tried() -> None:
    allowed = list(Space(allows=lambda one: one.activations == FULL and not one.chooses_slices).strategies(TASK))
    assert allowed
    assert allowed == [one for one in Space().strategies(TASK) if one.activations == FULL and not one.chooses_slices]


def test_budgets_are_those_of_whole_devices() -> None:
    strategy = Strategy(1, (6,), 1024, activations=PRICED)
    found = with_budgets(small_task(memory_bytes=2e9, host_bytes=3.456e9), strategy)
    assert found.host_gb == 3.456
    assert found.device_gb == 2.0
    assert with_budgets(TASK, replace(strategy, activations=KEEP)).device_gb is None


def test_stages_are_balanced_in_time_and_within_memory() -> None:
    heavy = Task(replace(COST, head_forward=1e-5, head_backward=2e-5), TASK.devices, TASK.context, TASK.steps)
    one = Strategy(1, (1, 1), 1024)
    assert balanced_stages(heavy, one) == (4, 2)
    assert balanced_stages(TASK, one) == (3, 3)
    none = replace(heavy, devices=replace(TASK.devices, memory_bytes=1e5))
    assert balanced_stages(none, one) is None
    assert (4, 2) in {strategy.stage_layers for strategy in Space(stages=(2,)).strategies(heavy)}


def test_memory_limits_the_first_stage() -> None:
    """The first stage has the most micro-batches in flight, so with little memory it gets fewer layers."""
    heavy = Task(replace(COST, head_forward=1e-5, head_backward=2e-5), TASK.devices, TASK.context, TASK.steps)
    one, found = Strategy(1, (1, 1), 4096), []
    for megabytes in range(200, 0, -4):
        layers = balanced_stages(replace(heavy, devices=replace(TASK.devices, memory_bytes=megabytes * 1e6)), one)
        found += [layers] if layers is not None else []
    assert found[0] == (4, 2)
    assert found[-1][0] < 4


def test_ranks_that_share_experts_divide_both() -> None:
    sparse = replace(TASK, cost=replace(COST, shape=SPARSE))
    assert expert_sizes(TASK, 8) == [1]
    assert expert_sizes(sparse, 8) == [1, 2, 4, 8]
    assert expert_sizes(sparse, 6) == [1, 2]
    found = list(Space(tensor_parallel=(1,), stages=(2,), tokens_per_rank=(1024,)).strategies(sparse))
    assert {one.expert_parallel for one in found} == {1, 2, 4}
    assert {one.expert_parallel for one in Space(stages=(1,), expert_parallel=(4,)).strategies(sparse)} == {4}


@pytest.mark.parametrize("shape", [SHAPE, SPARSE])
@pytest.mark.slow
def test_no_strategy_undercuts_the_bound_of_its_branch(shape: ModelShape) -> None:
    task = replace(TASK, cost=replace(COST, shape=shape, head_forward=2e-6), steps=(STEPS[0][:4], STEPS[1][4:]))
    task = replace(task, devices=replace(task.devices, count=4))
    work = [(float(sum(step)), float(sum(length**2 for length in step))) for step in task.steps]
    space, ratios = Space(tokens_per_rank=(2048,), pipelines=("whole", "virtual")), []
    for branch in space.branches(task):
        bound = branch.least_seconds(task, work)
        for case in fitting_cases(task, branch.strategies, Exploration()):
            ratios.append(bound / np.mean([case.run(step).seconds for step in task.steps]))
            assert case.strategy.num_stages == branch.mesh.num_stages
    assert 0.5 < max(ratios) <= 1.0


def test_the_slowest_of_the_best_stages() -> None:
    """The result equals the best of all divisions of six layers into three stages. The last stage also has the head."""
    for head in (0.0, 1.5, 4.0):
        ways = [(one, two, 6 - one - two) for one in range(1, 5) for two in range(1, 6 - one)]
        every = [max(one * 2.0, two * 2.0, three * 2.0 + head) for one, two, three in ways]
        assert slowest_stage_seconds(6, 3, 2.0, head) == min(every)
    assert slowest_stage_seconds(6, 1, 2.0, 1.5) == 13.5
