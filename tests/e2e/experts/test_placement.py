"""Training with replicas equals training without them, in losses and every parameter, while the placement changes."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.devices import on_ghosts
from tests.e2e.hdp.test_moe import SHARDED, with_equal_weights
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, SavedRun, train_once, train_ranks, train_with
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-6
STEPS, HALF = 20, 10
# One dense layer and one layer of experts. Each micro-batch draws a new bias of the router, so that loads change a lot
# from step to step, and rounding errors do not select other experts.
MOE = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1] "
    "--moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none --moe-router-force-biased 2.0 "
    "--moe-shared-expert-intermediate-size 16"
).split()
EP2 = ["--expert-model-parallel-size", 2]
# Computing is slow and links are fast, so that replicas pay off even for few tokens.
SLOTS = "--moe-expert-slots 6 --moe-placement-threshold 1.02 --moe-placement-speeds 1e-6 1000".split()
SAMPLES = ["--micro-batch-size", 2]
RECOMPUTED = "--recompute-granularity selective --recompute-modules moe".split()
ENTRY = partial(with_equal_weights, None)


def words(corpus: Path, *flags: object, steps: int = STEPS) -> list[object]:
    return [*MODEL, *TRAIN, *MOE, "--data-path", corpus, "--train-iters", steps, "--lr-decay-iters", STEPS, *flags]


@pytest.fixture(scope="module")
def plain(corpus: Path) -> SavedRun:
    """Twenty steps without slots, on two ranks."""
    return train_once(2, *words(corpus, *SAMPLES, *EP2, "--save-interval", HALF), entry=ENTRY)


def weights(save: Path, rank: int, step: int) -> dict[str, torch.Tensor]:
    """Return the parameters that one of two ranks has saved after a step."""
    (file,) = (save / f"iter_{step:07d}").glob(f"mp_rank_00_{rank:03d}/model_optim_rng.pt")
    state = torch.load(file, weights_only=False, map_location="cpu")["model"]
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def check_equal(found: Path, expected: Path, step: int = STEPS) -> None:
    for rank in range(2):
        mine, others = weights(found, rank, step), weights(expected, rank, step)
        assert mine.keys() == others.keys()
        assert sum("experts.local_experts" in name for name in mine) == 2 * 4
        for name, value in mine.items():
            assert torch.allclose(value, others[name], rtol=TOLERANCE, atol=TOLERANCE), f"{name} of rank {rank}"


def moves(outcome: Outcome) -> list[int]:
    """Return the new replicas of each step."""
    return [int(number) for number in re.findall(r"; (\d+) new replicas", outcome.text)]


@pytest.mark.full
def test_every_parameter_is_that_of_training_without_replicas(plain: SavedRun, corpus: Path, tmp_path: Path) -> None:
    flags = [*SAMPLES, *EP2, *SLOTS, *SHARDED, *RECOMPUTED, "--save", tmp_path]
    outcome = train_ranks(2, *words(corpus, *flags), entry=ENTRY)[-1]
    assert sum(moved > 0 for moved in moves(outcome)) >= 5
    assert outcome.losses == pytest.approx(plain.losses, rel=TOLERANCE)
    check_equal(tmp_path, plain.save)


@pytest.mark.full
def test_megatron_alone_goes_on(plain: SavedRun, corpus: Path, tmp_path: Path) -> None:
    """A checkpoint of a run with replicas equals a checkpoint of a run without them."""
    common = [*SAMPLES, *EP2, "--save", tmp_path, "--exit-interval", HALF // 2]
    begun = train_ranks(2, *words(corpus, *common, *SLOTS), entry=ENTRY)[-1]
    assert sum(moves(begun)) >= 3
    alone = train_ranks(2, *words(corpus, *common, "--load", tmp_path), entry=ENTRY)[-1]
    assert moves(alone) == []
    assert alone.losses[0] == pytest.approx(plain.losses[HALF // 2], rel=TOLERANCE)
    check_equal(tmp_path, plain.save, HALF)


@pytest.mark.full
def test_a_run_with_replicas_goes_on_from_megatrons(plain: SavedRun, corpus: Path, tmp_path: Path) -> None:
    """The measurement at the start determines the replicas, but not the losses."""
    slots = "--moe-expert-slots 6 --moe-placement-threshold 1.02".split()
    flags = [*SAMPLES, *EP2, *slots, "--load", plain.save, "--ckpt-step", HALF, "--exit-interval", HALF + 2]
    resumed = train_ranks(2, *words(corpus, *flags), entry=ENTRY)[-1]
    assert len(re.findall(r"placement of experts, measured at start in .* TFLOP/s in an expert", resumed.text)) == 1
    assert len(moves(resumed)) == 2
    assert resumed.losses[0] == pytest.approx(plain.losses[HALF], rel=TOLERANCE)


EP4 = ["--expert-model-parallel-size", 4]
EPLB = ["--moe-placement", "eplb", "--moe-shared-expert-overlap", "--moe-grouped-gemm"]
ALLGATHER = ["--moe-token-dispatcher-type", "allgather"]


def with_grouped_products() -> None:
    """Entry with equal weights that lets ``--moe-grouped-gemm`` pass Megatron's check of the GPU."""
    from megatron.bytescale.core.transformer.moe import slot_experts

    grouped = slot_experts.grouped_pass

    def noted(expert: Any, experts: Any, *given: Any) -> torch.Tensor:
        print(f"GROUPED {len(experts)}")
        return grouped(expert, experts, *given)

    torch.cuda.get_device_capability = lambda device=None: (8, 0)
    slot_experts.grouped_pass = noted
    ENTRY()


@pytest.mark.parametrize(
    "flags", sampled([EPLB, ALLGATHER], [ALLGATHER]), ids=["eplb in grouped products", "allgather"]
)
def test_four_ranks_share_experts(flags: list[object], corpus: Path) -> None:
    expected = train_once(4, *words(corpus, *SAMPLES, *EP4, steps=3), entry=ENTRY)
    slots = [*SAMPLES, *EP4, *SLOTS, "--moe-expert-slots", 4, *flags]
    ranks = train_ranks(4, *words(corpus, *slots, steps=3), entry=with_grouped_products)
    outcome = ranks[-1]
    grouped = {int(count) for one in ranks for count in re.findall(r"^GROUPED (\d+)$", one.text, re.MULTILINE)}
    assert (max(grouped, default=0) > 2) == (flags is EPLB)  # two home experts on each rank, and replicas
    assert len(moves(outcome)) == 3
    assert sum(moves(outcome)) >= 3
    assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--moe-router-num-groups 4 --moe-router-group-topk 2",
        "--moe-router-topk 1 --moe-router-pre-softmax --moe-apply-probs-on-input",
    ],
    ids=["groups", "probabilities on inputs"],
)
def test_other_routers(flags: str, corpus: Path) -> None:
    common = [*SAMPLES, *EP2, *flags.split()]
    expected = train_once(2, *words(corpus, *common, steps=3), entry=ENTRY)
    outcome = train_ranks(2, *words(corpus, *common, *SLOTS, steps=3), entry=ENTRY)[-1]
    assert sum(moves(outcome)) > 0
    assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)


def print_plan(runtime: Any, model: torch.nn.Module) -> None:
    step, history = runtime.step.batch, runtime.parts.load_history
    load = 1.0 if history is None else history.at(step.step_index)
    print(f"PLAN {load:.6f} {step.plan.digest()}")


def with_plans() -> None:
    """Entry with equal weights that prints the load and the plan of each step."""
    with_equal_weights(partial(train_with, print_plan))


@pytest.mark.full
def test_documents_with_unequal_micro_batches(corpus: Path) -> None:
    """Two pairs of ranks share experts, with different numbers of tokens and micro-batches, in slices.

    Two ranks share the optimizer of each expert, whose weights are gathered while layers run.

    Plans are made one step ahead, so the plan of the third step is the first that uses a measured load, of step one.
    """
    flags = [*HDP, *EP2, "--hdp-tokens-per-rank", 128, "--seq1f1b-slices", 2, "--moe-router-force-biased", -2.0]
    expected = train_once(4, *words(corpus, *flags, steps=3), entry=with_plans)
    ranks = train_ranks(4, *words(corpus, *flags, *SLOTS, *SHARDED, steps=3), entry=with_plans)
    assert ranks[-1].losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert sum(moves(ranks[-1])) > 0
    (planned,) = {plans(outcome) for outcome in ranks}
    loads = [float(load) for load, _ in planned]
    assert loads[:2] == [1.0, 1.0]
    assert (1.0 if on_ghosts() else 1.1) < loads[2] < 2.0  # each device draws other biases
    assert {load for load, _ in plans(expected.outcomes[-1])} == {"1.000000"}


def plans(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    """Return the load that each step's plan assumes on a rank, and the digest of the plan."""
    return tuple(re.findall(r"^PLAN ([\d.]+) (\w+)$", outcome.text, re.MULTILINE))
