"""Flags of hybrid data parallelism, through Megatron's parser and checks: configuration or error line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from bytescale_ext.measure.devices import scaled_device_cost
from bytescale_ext.plan.evaluate.slicing_choice import OPTIONS, OPTIONS_WITH_HOST_MEMORY
from bytescale_ext.plan.hdp import table
from bytescale_ext.plan.hdp.baselines import place_naive
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.hdp.table import PlannerRow, planner_names, stateless
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.cli import plan, simulate
from megatron.bytescale.features.hdp import flags as hdp
from scripts import reference
from tests.bytescale.arguments.resolving import check_refused, resolved
from tests.config.runs import SHAPE, hdp_of
from tests.e2e.training import HDP, MODEL, TRAIN

KNOWN = scaled_device_cost(SHAPE, 1, "float32")
"""Costs of the model without a cost file."""
COMMON = [*MODEL, *TRAIN, *HDP, "--data-path", "unread"]


@pytest.mark.ranks
def test_the_configuration_holds_what_was_given() -> None:
    words = ["--hdp-static-width", 4, "--hdp-log-dir", "logs", "--hdp-timeline-step", 3, "--hdp-memory-step", 2]
    found = resolved(4, *COMMON, *words, "--hdp-global-tokens", 256)
    values = found.args
    expected = hdp_of(
        cost=KNOWN.whole(),
        global_tokens=256,
        static_width=4,
        log_dir=Path("logs"),
        timeline_step=3,
        memory_step=2,
        plan_ahead=1,
    )
    assert found.features == {"hdp": expected}
    assert values["calculate_per_token_loss"] is True
    assert values["dataloader_type"] == "external"
    assert values["micro_batch_size"] == values["eval_micro_batch_size"] == 1
    assert values["create_attention_mask_in_dataloader"] is False
    assert values["dist_ckpt_optim_fully_reshardable"] is True


@pytest.mark.ranks
def test_fp16_starts_with_a_loss_scale_for_sums_over_tokens() -> None:
    values = resolved(4, *COMMON, "--fp16").args
    assert values["initial_loss_scale"] == 2**16 / 128  # 64 tokens, rounded up to a larger power of two
    assert values["accumulate_allreduce_grads_in_fp32"] is True
    assert resolved(4, *COMMON, "--fp16", "--initial-loss-scale", 4).args["initial_loss_scale"] == 4
    assert resolved(4, *COMMON, "--fp16", "--loss-scale", 2).args["loss_scale"] == 2
    largest = ["--fp16", "--seq-length", 200000, "--max-position-embeddings", 200000, "--hdp-tokens-per-rank", 100000]
    assert resolved(4, *COMMON, *largest).args["initial_loss_scale"] == 1


@pytest.mark.ranks
def test_parameter_gathers_stay_aligned() -> None:
    """Megatron disables it without virtual stages. A rank that waits in a ring would then delay another rank."""
    words = ["--overlap-param-gather", "--overlap-grad-reduce", "--use-distributed-optimizer"]
    assert resolved(4, *COMMON, *words).args["align_param_gather"] is True


def actions_of(add_arguments: Callable[[argparse.ArgumentParser], None]) -> dict[str, argparse.Action]:
    """Return the options that a command adds to a parser, by name."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {option: action for action in parser._actions for option in action.option_strings}


def test_a_new_planner_is_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag, both commands, the page of flags and the configuration use the table."""
    assert "even" not in planner_names()
    row = PlannerRow("even", "nothing that is worth it", stateless(place_naive), aligned=True)
    monkeypatch.setattr(table, "PLANNERS", (*table.PLANNERS, row))
    flag = actions_of(hdp.add_arguments)["--hdp-balance"]
    assert flag.choices == ["auto", *planner_names()]
    assert planner_names()[-1] == "even"
    for action in (flag, actions_of(plan.add_arguments)["--balance"]):
        assert "even: nothing that is worth it" in str(action.help)
    assert "even" in str(actions_of(simulate.add_arguments)["--schedulers"].help)
    assert "| `even` | nothing that is worth it | yes | no |" in reference.flags_page()
    config = hdp_of(balance="even", num_stages=2)
    planner = HdpPlanner(config.cluster, (config.cost,) * 2, balance=config.balance)
    assert planner([50, 7, 12]) == replace(planner, balance="none")([50, 7, 12])


@pytest.mark.ranks
def test_each_planner_flag_reaches_the_configuration() -> None:
    line = "--hdp-balance bytescale --hdp-ranks-per-node 2 --hdp-plan-seconds 1.5"
    found = resolved(4, *COMMON, *line.split(), "--hdp-plan-ahead", 3, "--hdp-hierarchical-rings", "off")
    expected = hdp_of(ranks_per_node=2, balance="bytescale", plan_ahead=3, plan_seconds=1.5, learns_costs=True)
    cluster = replace(expected.cluster, hierarchical_rings="off")
    cost = found.features["hdp"].cost
    assert found.features["hdp"] == replace(expected, cluster=cluster, cost=cost)
    assert cost.forward.nodes is not None, "links between nodes are slower"
    found = resolved(4, *COMMON, *"--seq1f1b-slices 3 --hdp-kept-keys 0".split())
    assert found.features["slices"].slicing == Slicing(3, kept_tokens=0)


@pytest.mark.ranks
def test_swapped_keys_have_host_memory_and_a_price() -> None:
    """Keys have 256 tokens in float32: two slices in flight have the tokens of a micro-batch."""
    words = "--seq1f1b-slices 2 --hdp-kept-keys 0 --hdp-swapped-keys 256 --host-memory-gb 0.01".split()
    fast, slow = (
        resolved(4, *COMMON, *words, "--link-gb-per-second", speed, *more)
        for speed, more in ((4, ["--swap-fraction", 0.5]), (2, []))
    )
    slices = slow.features["slices"]
    assert (slices.slicing, slices.host_bytes) == (Slicing(2, 0, swapped_tokens=256), 1e7)
    costs = [found.features["hdp"].cost for found in (fast, slow)]
    assert costs[1].key_read == 2 * costs[0].key_read > 0
    assert costs[1].forward.b < 1e-3  # seconds, not FLOPs
    activations = fast.features["activations"]
    keys = activations.layers.key_host_bytes
    assert keys == pytest.approx(256 * costs[0].key_read * 4e9)
    assert activations.host_bytes == activations.machine.host_bytes + keys == 1e7
    assert resolved(4, *COMMON, *words[:4]).features["slices"].host_bytes == 0


@pytest.mark.ranks
def test_the_planner_may_swap_keys_where_there_is_host_memory_and_no_policy() -> None:
    words = "--pipeline-model-parallel-size 2 --seq1f1b-slices auto --device-memory-gb 1".split()
    without, with_host = (resolved(8, *COMMON, *words, *more) for more in ([], ["--host-memory-gb", 0.01]))
    assert (without.features["slices"].host_bytes, without.decision.slices.options) == (0, OPTIONS)
    assert with_host.features["slices"].host_bytes == with_host.decision.slices.host_bytes == 1e7
    assert with_host.decision.slices.options == OPTIONS_WITH_HOST_MEMORY


@pytest.mark.ranks
def test_balance_by_itself_is_that_of_free_ranks_or_of_pipelines() -> None:
    assert resolved(4, *COMMON).features["hdp"].balance == "dp"
    config = resolved(8, *COMMON, "--pipeline-model-parallel-size", 2).features["hdp"]
    assert (config.balance, config.cluster.num_ranks, config.num_stages, config.aligned) == ("pp", 4, 2, True)


@pytest.mark.ranks
def test_without_hybrid_data_parallelism_its_defaults_stay_megatrons() -> None:
    found = resolved(1, *MODEL, *TRAIN, "--micro-batch-size", 2, "--data-path", "unread")
    values = found.args
    assert found.features == {}
    assert values["calculate_per_token_loss"] is False
    assert values["micro_batch_size"] == 2
    assert values["dataloader_type"] != "external"


# (processes, words after the common words, words of the refusal)
REFUSED = (
    (4, "--global-batch-size 6", "6 is not a multiple of the 4 data-parallel ranks|next multiple is 8"),
    (4, "--eval-global-batch-size 6", "--eval-global-batch-size 6 is not a multiple of the 4|next multiple is 8"),
    (3, "--global-batch-size 9", "--seq-length 256|there are 3|--hdp-tokens-per-rank that fits is 86"),
    (4, "--hdp-tokens-per-rank 0", "--hdp-tokens-per-rank must be positive, got 0"),
    (4, "--tensor-model-parallel-size 2", "there are 2|fits is 128"),
    (3, "--tensor-model-parallel-size 2", "3 processes|start 4 processes"),
    (
        8,
        "--tensor-model-parallel-size 2 --sequence-parallel --hdp-tokens-per-rank 65",
        "--hdp-tokens-per-rank 65|a multiple of 2|--sequence-parallel|66",
    ),
    (4, "--hdp-plan-ahead 0", "--hdp-plan-ahead must be at least 1, got 0"),
    (4, "--hdp-learn-costs of", "--hdp-learn-costs of: give on, off, or the name of a .json file"),
    (4, "--hdp-learn-costs a.json --hdp-static-width 2", "--hdp-learn-costs a.json|--hdp-static-width learn no costs"),
    (4, "--hdp-learn-costs a.json --hdp-loader ray", "--hdp-learn-costs a.json|--hdp-loader ray learn no costs"),
    (4, "--hdp-plan-seconds 0", "--hdp-plan-seconds must be positive, got 0"),
    (4, "--hdp-ranks-per-node 0", "--hdp-ranks-per-node must be at least 1, got 0"),
    (8, "--hdp-balance dp --pipeline-model-parallel-size 2", "--hdp-balance dp |use auto, which selects pp"),
    (6, "--pipeline-model-parallel-size 4", "6 processes|x --pipeline-model-parallel-size 4|start 8"),
    (4, "--hdp-static-width 3", "--hdp-static-width 3 does not divide the 4"),
    (4, "--seq1f1b-slices 2 --hdp-kept-keys -1", "--hdp-kept-keys must be at least 0, got -1"),
    (4, "--seq1f1b-slices 2 --hdp-swapped-keys -1", "--hdp-swapped-keys must be at least 0, got -1"),
    (4, "--seq1f1b-slices 2 --hdp-swapped-keys 9", "--hdp-swapped-keys needs --host-memory-gb"),
    (
        4,
        "--seq1f1b-slices 2 --hdp-swapped-keys 256 --hdp-kept-keys 0 --host-memory-gb 0.00001",
        "keys of documents of up to 256 tokens take|GB of host memory, and --host-memory-gb is 1e-05|swap fewer",
    ),
    (4, "--hdp-timeline-step 3", "--hdp-timeline-step needs --hdp-log-dir"),
)


@pytest.mark.ranks
def test_values_that_do_not_fit_are_refused() -> None:
    line = [*MODEL, *TRAIN, "--data-path", "unread", "--hybrid-data-parallel"]
    sized = [*line, "--hdp-tokens-per-rank", "64"]
    without_length = [word for word in sized if word not in ("--seq-length", "256", "--max-position-embeddings")]
    at = sized.index("--global-batch-size")
    check_refused(
        *((num_processes, [*COMMON, *words.split()], message) for num_processes, words, message in REFUSED),
        (4, line, "--hybrid-data-parallel needs --hdp-tokens-per-rank"),
        (4, without_length, "--hybrid-data-parallel needs --seq-length"),
        (4, [*sized[:at], *sized[at + 2 :]], "--hybrid-data-parallel needs --global-batch-size"),
        (4, [*MODEL, *TRAIN, "--hdp-plan-ahead", 2], "--hdp-plan-ahead needs --hybrid-data-parallel"),
    )
