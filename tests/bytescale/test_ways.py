"""One model and cluster through training, plan, simulate, search, states, activations and dry-run: one setup."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.activation.load import cost_of_rates
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.search.costed import setup_of_strategy
from bytescale_ext.plan.search.strategy import PRICED, Strategy
from bytescale_ext.plan.search.task import Devices, Task
from bytescale_ext.plan.setup.choose import Decision, choose
from bytescale_ext.plan.setup.costs import stage_costs
from bytescale_ext.plan.setup.forecast import Forecast
from bytescale_ext.plan.setup.layers import stage_settings
from bytescale_ext.plan.setup.memory import stage_memory, stage_state_bytes
from bytescale_ext.plan.setup.planner import planner_of
from bytescale_ext.plan.setup.setup import AUTO, Policy, Setup
from bytescale_ext.plan.states.step_time import StateOption
from bytescale_ext.plan.step.sizes import ONE_SLICE
from megatron.bytescale.arguments.setup import setup_of as setup_of_training
from megatron.bytescale.cli import plan as plan_command
from megatron.bytescale.cli.activations import add_arguments as add_activations
from megatron.bytescale.cli.activations import setup_of_options as setup_of_activations
from megatron.bytescale.cli.plan import decision_of
from megatron.bytescale.cli.shared.model_flags import arguments_of, model_of
from megatron.bytescale.cli.states.command import add_arguments as add_states
from megatron.bytescale.cli.states.computing import setup_of_options as setup_of_states

MODEL = (
    "--num-layers 8 --hidden-size 256 --ffn-hidden-size 512 --num-attention-heads 8 --group-query-attention "
    "--num-query-groups 4 --swiglu --normalization RMSNorm --disable-bias-linear --bf16 --vocab-size 4096 "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --transformer-impl local "
    "--no-persist-layer-norm"
)
RANKS, TOKENS, LONGEST, STAGES, DEVICE_GB, HOST_GB = 4, 2048, 8192, 2, 0.4, 2.0
LENGTHS = [8192, 300, 5000, 40, 2048, 900, 77, 3000, 12, 1500, 600, 2100]
MESH = f"--use-distributed-optimizer --pipeline-model-parallel-size {STAGES}"
SIZES = f"--hdp-tokens-per-rank {TOKENS} --seq-length {LONGEST} --max-position-embeddings {LONGEST}"


def of(add_arguments: object, words: str) -> argparse.Namespace:
    """Return the options of a command."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)  # type: ignore[operator]
    return parser.parse_args(words.split())


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelCost, Path]:
    """Return costs of the model, and their file."""
    model = model_of(MODEL.split())
    path = tmp_path_factory.mktemp("cost") / "cost.json"
    found = cost_of_rates(model.shape, 1e14, 1e14, 1e14)
    write_cost(path, found)
    return found, path


def training(words: str, path: Path, processes: int = RANKS * STAGES, mesh: str = MESH) -> Setup:
    """Return the setups of training and dry-run for a launch line."""
    line = f"{MODEL} --hybrid-data-parallel {SIZES} {mesh} --cost-file {path} {words}"
    args = arguments_of(line.split(), processes=processes)
    args.fake_process_group = True
    return setup_of_training(args)


def search(cost: ModelCost, **changes: object) -> Setup:
    """Return the search's setup of the strategy with this mesh."""
    model = model_of(MODEL.split())
    devices = Devices(RANKS * STAGES, RANKS * STAGES, DEVICE_GB * 1e9, HOST_GB * 1e9)
    task = Task(cost, devices, LONGEST, (tuple(LENGTHS),), model.operators, state_sizes=model.state_sizes)
    strategy = Strategy(1, (8 // STAGES,) * STAGES, TOKENS, shares_optimizer=True, device_gb=DEVICE_GB, **changes)  # type: ignore[arg-type]
    return setup_of_strategy(task, strategy)


def assert_alike(first: Setup, other: Setup) -> None:
    """Layers, memory, model states and costs of each stage are equal."""
    stages = range(first.mesh.num_stages)
    slicings = [setup.given_slicing if not setup.chooses_slices else ONE_SLICE for setup in (first, other)]
    assert slicings[0] == slicings[1]
    for stage in stages:
        assert stage_settings(first, stage, slicings[0]) == stage_settings(other, stage, slicings[1])
    assert stage_state_bytes(first) == pytest.approx(stage_state_bytes(other))
    assert stage_memory(first) == stage_memory(other)
    assert stage_costs(first) == stage_costs(other)


def assert_decided_alike(first: Decision, other: Decision) -> None:
    """Plans, slices, policies and forecasts of a step are equal."""
    assert_alike(first.setup, other.setup)
    plans = [planner_of(decision)(LENGTHS) for decision in (first, other)]
    assert plans[0].digest() == plans[1].digest()
    assert plans[0].slicing == plans[1].slicing
    forecasts = [Forecast(decision) for decision in (first, other)]
    tables = [forecast.table(plan) for forecast, plan in zip(forecasts, plans, strict=True)]
    times, memories = zip(
        *((forecast.time(*table), forecast.memory(*table)) for forecast, table in zip(forecasts, tables, strict=True)),
        strict=True,
    )
    assert times[0] == times[1]
    assert memories[0] == memories[1]
    assert forecasts[0].traffic(*tables[0]) == forecasts[1].traffic(*tables[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("", {}),
        (f"--seq1f1b-slices auto --device-memory-gb {DEVICE_GB}", {"chooses_slices": True}),
        (
            f"--activation-policy priced --device-memory-gb {DEVICE_GB} --host-memory-gb {HOST_GB}",
            {"activations": PRICED, "host_gb": HOST_GB},
        ),
        (
            f"--seq1f1b-slices auto --activation-policy priced --device-memory-gb {DEVICE_GB} "
            f"--host-memory-gb {HOST_GB}",
            {"activations": PRICED, "host_gb": HOST_GB, "chooses_slices": True},
        ),
        ("--num-virtual-stages-per-pipeline-rank 2", {"chunks": 2}),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2",
         {"activations": "block", "recomputed_layers": 2}),
    ],
    ids=["whole", "slices", "policy", "slices-policy", "virtual", "block"],
)  # fmt: skip
def test_training_and_search_decide_alike(
    words: str, changes: dict[str, object], cost: tuple[ModelCost, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(RANKS * STAGES))
    trained, searched = choose(training(words, cost[1])), choose(search(cost[0], **changes))
    assert_decided_alike(trained, searched)


@pytest.mark.slow
def test_plan_and_simulate_decide_like_training(cost: tuple[ModelCost, Path]) -> None:
    """The commands know neither the operators nor the optimizer of a model, so training gets fused ones."""
    options = (
        f"--ranks {RANKS} --tokens-per-rank {TOKENS} --pipeline-parallel {STAGES} --slices auto --lengths unread.npy"
    )
    args = of(plan_command.add_arguments, f"{options} --device-memory-gb {DEVICE_GB}")
    planned = decision_of(args, cost[0], LENGTHS)
    setup = training(f"--seq1f1b-slices auto --device-memory-gb {DEVICE_GB}", cost[1])
    numerics = replace(setup.numerics, operators=planned.setup.numerics.operators)
    states = replace(setup.states, sizes=planned.setup.states.sizes)
    assert_decided_alike(planned, choose(replace(setup, numerics=numerics, states=states)))


def test_states_choose_like_training(cost: tuple[ModelCost, Path]) -> None:
    options = (
        f"--pipeline-parallel {STAGES} --optimizer-ranks {RANKS} --tokens-per-rank {TOKENS} --activation-policy priced"
    )
    budgets = f"--device-memory-gb {DEVICE_GB} --host-memory-gb {HOST_GB} --cost-file {cost[1]}"
    args = of(add_states, f"--model-flags X {options} {budgets}")
    args.model_flags = MODEL
    asked = setup_of_states(args)
    asked = choose(replace(asked, states=replace(asked.states, option=AUTO)))
    words = f"--state-policy auto --activation-policy priced --device-memory-gb {DEVICE_GB} --host-memory-gb {HOST_GB}"
    setup = training(words, cost[1])
    same = {"sequences": replace(setup.sequences, longest=TOKENS, micro_batches=1), "states": asked.setup.states}
    trained = choose(replace(setup, **{**same, "states": replace(setup.states, speeds=asked.setup.states.speeds)}))
    assert asked.states is not None
    assert trained.states is not None
    assert asked.states.chosen == trained.states.chosen
    assert asked.setup.states.allowed == trained.setup.states.allowed


def test_states_offers_what_training_allows(cost: tuple[ModelCost, Path]) -> None:
    """A flag that keeps gradients on the device leaves only ``--state-stage 1``."""
    args = of(add_states, "--model-flags X --tokens-per-rank 2048")
    args.model_flags = f"{MODEL} --overlap-grad-reduce"
    assert setup_of_states(args).states.allowed == (1,)


def test_activations_plan_like_training(cost: tuple[ModelCost, Path]) -> None:
    args = of(add_activations, f"--device-memory-gb {DEVICE_GB} --host-memory-gb {HOST_GB} --cost-file {cost[1]}")
    args.model_flags = MODEL
    asked = setup_of_activations(args)
    words = f"--activation-policy priced --device-memory-gb {DEVICE_GB} --host-memory-gb {HOST_GB}"
    trained = training(words, cost[1], processes=RANKS, mesh="")
    asked = replace(
        asked, cluster=trained.cluster, sequences=trained.sequences, policy=Policy(PRICED),
        mesh=replace(asked.mesh, shares_optimizer=False, devices_per_node=trained.mesh.devices_per_node),
    )  # fmt: skip
    assert asked.states.option == StateOption()
    assert_decided_alike(choose(asked), choose(trained))
