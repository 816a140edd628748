"""Steps prepared ahead in the background."""

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.data.loading.loader import StepLoader
from bytescale_ext.data.loading.planning import PlanMaker, Planner, PlannerInProcess
from bytescale_ext.data.loading.step import LoaderSettings, StepBatch
from bytescale_ext.errors import OutOfTime, PlanError
from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster, Slicing
from tests.data.sources import MemorySource
from tests.plan.simple_plans import plan_naive

LENGTHS = [5, 1, 30, 12, 3, 3, 17, 8, 2, 40, 6, 9, 1, 1, 25, 4]


def _planner(num_ranks: int = 4, tokens_per_rank: int = 12) -> Callable[[Sequence[int]], StepPlan]:
    return partial(plan_naive, num_ranks=num_ranks, tokens_per_rank=tokens_per_rank)


def _loader(
    source: MemorySource,
    rank: int = 0,
    num_ranks: int = 4,
    planner: Any = None,
    plan_options: dict[str, Any] | None = None,
    **options: Any,
) -> StepLoader:
    plans = PlanMaker(planner or _planner(num_ranks), **plan_options or {})
    return StepLoader(source, plans, LoaderSettings(rank, **{"samples_per_step": 4, "rows_multiple": 4, **options}))


def _key(batch: StepBatch) -> tuple[object, ...]:
    tensors = [(m.tokens.tolist(), m.labels.tolist(), m.loss_mask.tolist()) for m in batch.micro_batches]
    return batch.step_index, batch.sample_ids, batch.lengths, batch.plan.digest(), tensors


def test_steps_of_as_many_samples_as_fit_their_tokens() -> None:
    """The last samples, which do not fill a step, are left out. A step that is made again is equal."""
    steps = list(_loader(MemorySource(LENGTHS), tokens_per_step=41))
    assert [step.sample_ids for step in steps] == [(0, 1, 2), (3, 4, 5, 6), (7, 8), (9,), (10, 11, 12, 13)]
    assert [step.num_tokens for step in steps] == [36, 35, 10, 40, 17]
    loader = _loader(MemorySource(LENGTHS), tokens_per_step=41, consumed_samples=7, first_step=2)
    assert [_key(step) for step in loader] == [_key(step) for step in steps[2:]]


def test_steps_that_grow() -> None:
    schedule = ((0, 2), (3, 5))
    steps = list(_loader(MemorySource(LENGTHS), schedule=schedule))
    assert [step.sample_ids for step in steps] == [(0, 1), (2, 3), tuple(range(4, 9)), tuple(range(9, 14))]
    loader = _loader(MemorySource(LENGTHS), schedule=schedule, consumed_samples=4, first_step=2)
    assert [_key(step) for step in loader] == [_key(step) for step in steps[2:]]


@pytest.mark.parametrize("num_ranks", [4, 5, 8])
def test_all_ranks_together_hold_each_token_once(num_ranks: int) -> None:
    """Tokens and labels by (document, position) equal the documents, for any number of ranks."""
    source = MemorySource(LENGTHS, seq_length=20)
    found: list[tuple[int, int, int, int, float]] = []
    for rank in range(num_ranks):
        for step in _loader(source, rank, num_ranks):
            for packed in step.micro_batches:
                row = 0
                for shard in packed.micro_batch.shards:
                    document, start, _ = source.pieces[step.sample_ids[shard.seq]]
                    rows = slice(row, row + shard.num_tokens)
                    columns = (packed.positions, packed.tokens, packed.labels, packed.loss_mask)
                    for position, *values in zip(*(c[rows].tolist() for c in columns), strict=True):
                        found.append((document, start + position, *values))
                    row = rows.stop
                assert not packed.loss_mask[row:].any()
    taken = source.pieces[: len(source) // 4 * 4]
    expected = []
    for document, start, length in taken:
        tokens = source.documents[document].tolist()
        for place in range(start, start + length):
            last = place + 1 == len(tokens)
            expected.append((document, place, tokens[place], 0 if last else tokens[place + 1], 0.0 if last else 1.0))
    assert sorted(found) == sorted(expected)


def test_a_rank_reads_only_its_own_ranges() -> None:
    for rank in range(4):
        source = MemorySource(LENGTHS)
        wanted = [
            (step.sample_ids[shard.seq], start, stop + 1)
            for step in _loader(source, rank)
            for micro_batch in step.plan.ranks[rank]
            for shard in micro_batch.shards
            for start, stop in shard.ranges
        ]
        assert source.reads == wanted


@pytest.mark.parametrize("consumed", [0, 4, 8, 12])
def test_a_resumed_loader_gives_the_same_steps(consumed: int) -> None:
    whole = [_key(step) for step in _loader(MemorySource(LENGTHS), rank=1)]
    fresh = _loader(MemorySource(LENGTHS), rank=1, consumed_samples=consumed, first_step=consumed // 4)
    assert [_key(step) for step in fresh] == whole[consumed // 4 :]


def test_the_state_counts_what_was_handed_out_not_what_was_made() -> None:
    whole = [_key(step) for step in _loader(MemorySource(LENGTHS))]
    loader = _loader(MemorySource(LENGTHS), plan_ahead=4)
    for _ in range(2):
        next(loader)
    state = loader.state_dict()
    assert state == {"consumed_samples": 8, "step_index": 2}
    list(loader)
    loader.load_state_dict(state)
    assert [_key(step) for step in loader] == whole[2:]
    other = _loader(MemorySource(LENGTHS), consumed_samples=4)
    other.load_state_dict(state)
    assert [_key(step) for step in other] == whole[2:]


def test_no_more_than_plan_ahead_steps_are_made() -> None:
    planned = threading.Semaphore(0)
    calls = []

    def planner(lengths: Sequence[int]) -> StepPlan:
        calls.append(tuple(lengths))
        planned.release()
        return _planner()(lengths)

    loader = _loader(MemorySource([2] * 40), samples_per_step=2, plan_ahead=3, planner=planner)
    for handed_out in range(4):
        for _ in range(3 if handed_out == 0 else 1):
            assert planned.acquire(timeout=400)
        assert len(calls) == 3 + handed_out
        # If a further step were allowed, the thread would plan it now.
        assert not planned.acquire(timeout=0.05)
        next(loader)
    loader.close()


def _fails_at(step: int, error: Exception) -> Callable[[Sequence[int]], StepPlan]:
    calls = []

    def planner(lengths: Sequence[int]) -> StepPlan:
        calls.append(1)
        if len(calls) > step:
            raise error
        return _planner()(lengths)

    return planner


@pytest.mark.parametrize("error", [KeyError("k"), MemoryError(), PlanError("bad row")])
def test_an_error_comes_with_its_type_after_the_good_steps(error: Exception) -> None:
    loader = _loader(MemorySource(LENGTHS), planner=_fails_at(2, error), plan_ahead=4)
    assert [next(loader).step_index for _ in range(2)] == [0, 1]
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            next(loader)
        assert caught.value is error
    assert loader.state_dict()["consumed_samples"] == 8


def test_a_bad_plan_is_refused_by_the_default_check() -> None:
    def drops_the_last(lengths: Sequence[int]) -> StepPlan:
        shards = tuple(Shard(i, ((0, n),), (0,)) for i, n in enumerate(lengths[:-1]))
        return StepPlan(1, 1000, tuple(lengths), ((MicroBatch(shards),),))

    with pytest.raises(PlanError):
        next(_loader(MemorySource(LENGTHS), planner=drops_the_last))
    trusted = _loader(MemorySource(LENGTHS), planner=drops_the_last, plan_options={"check": None})
    assert next(trusted).micro_batches[0].micro_batch.num_tokens == sum(LENGTHS[:3])
    trusted.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"plan_ahead": 0}, "plan_ahead 0"),
        ({"consumed_samples": -1}, "consumed_samples -1"),
        ({"samples_per_step": 0}, "0 samples per step"),
        ({"rank": -1}, "rank -1"),
        ({"rows_multiple": 0}, "rows_multiple 0"),
    ],
)
def test_bad_settings_are_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoaderSettings(**{"rank": 0, "samples_per_step": 4, **options})


def _threads() -> int:
    return sum(thread.name == "bytescale-loader" for thread in threading.enumerate())


def test_a_dropped_loader_takes_its_thread_along() -> None:
    before = _threads()
    loader = _loader(MemorySource([2] * 400), plan_ahead=1)
    next(loader)
    alive = weakref.ref(loader)
    del loader
    gc.collect()
    assert alive() is None
    assert _threads() == before


@pytest.mark.full
@pytest.mark.ranks
def test_the_interpreter_ends_with_a_loader_open() -> None:
    program = (
        "from functools import partial\n"
        "from bytescale_ext.data.loading.loader import StepLoader\n"
        "from bytescale_ext.data.loading.planning import PlanMaker\n"
        "from bytescale_ext.data.loading.step import LoaderSettings\n"
        "from tests.plan.simple_plans import plan_naive\n"
        "from tests.data.sources import MemorySource\n"
        "plan = partial(plan_naive, num_ranks=2, tokens_per_rank=8)\n"
        "settings = LoaderSettings(0, samples_per_step=2, cyclic=True)\n"
        "loader = StepLoader(MemorySource([3] * 100), PlanMaker(plan), settings)\n"
        "print(next(loader).num_tokens)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, timeout=400)
    assert (done.returncode, done.stdout) == (0, "6\n"), done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "Fatal" not in done.stderr, done.stderr


class SlowPlanner:
    """Planner that, under a time limit, waits until it must stop."""

    def __call__(self, lengths: Sequence[int], should_stop: Callable[[], bool] | None = None) -> StepPlan:
        if should_stop is None:
            return plan_naive(lengths, 4, 24)
        while not should_stop():
            pass
        raise OutOfTime

    def fallback(self, lengths: Sequence[int]) -> StepPlan:
        return plan_naive(lengths, 4, 12)


def test_a_planner_out_of_time_is_replaced_by_the_simple_plan() -> None:
    simple = [_key(step) for step in _loader(MemorySource(LENGTHS), rank=1)]
    loader = _loader(
        MemorySource(LENGTHS), rank=1, planner=SlowPlanner(), plan_options={"plan_seconds": 0.001}, plan_ahead=1
    )
    late = list(loader)
    assert [_key(step) for step in late] == simple
    assert all(step.fell_back and loader.simple_step(step) is step for step in late)


def test_a_step_planned_in_time_can_be_made_again_by_the_simple_plan() -> None:
    simple = [_key(step) for step in _loader(MemorySource(LENGTHS), rank=1)]
    loader = _loader(MemorySource(LENGTHS), rank=1, planner=SlowPlanner())
    in_time = list(loader)
    assert not any(step.fell_back for step in in_time)
    assert [_key(step) for step in in_time] != simple
    remade = [loader.simple_step(step) for step in in_time]
    assert [_key(step) for step in remade] == simple
    assert all(step.fell_back for step in remade)


COST = StageCost(CostModel(1.0, 1.0), CostModel(1.0, 1.0))


@pytest.mark.slow
@pytest.mark.parametrize("in_process", [False, pytest.param(True, marks=pytest.mark.ranks)])
@pytest.mark.parametrize("slice_rule", [None, SliceRule(Slicing(3))])
def test_checkpoints_hold_nothing_of_a_step(in_process: bool, slice_rule: SliceRule | None) -> None:
    """The loader of a resumed run makes the step again. A plan, which processes exchange, is small when pickled."""
    planner: Planner = HdpPlanner(Cluster(4, 12), (COST, COST), balance="pp")
    if in_process:
        planner = PlannerInProcess(planner, slow_seconds=-1.0)
    source = MemorySource([*LENGTHS, *[10] * 20_000])
    loader = _loader(source, planner=planner, slice_rule=slice_rule)
    next(loader)
    step = next(loader)  # planned in the process
    assert len(pickle.dumps(source)) > 200_000
    assert step.plan.ranks.table.counts.sum() > 0  # computed tables are not pickled
    plan = pickle.dumps(step.plan)
    assert len(plan) < 20_000
    assert pickle.loads(plan) == step.plan
    assert copy.copy(step) is step
    assert pickle.loads(pickle.dumps(step)) == ()
    loader.close()
