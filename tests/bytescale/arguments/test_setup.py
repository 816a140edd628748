"""Setup of a training from arguments, and the slices that fit under a policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.evaluate.policy_choice import KEPT_SHARES
from bytescale_ext.plan.setup.costs import cost_of_file
from bytescale_ext.plan.setup.memory import stage_state_bytes
from bytescale_ext.plan.setup.policy import under_policy
from megatron.bytescale.arguments.setup import setup_of
from tests.bytescale.arguments.resolving import resolved
from tests.bytescale.features.activations.test_flags import parsed
from tests.bytescale.features.slices.test_flags import CHOSEN
from tests.e2e.training import MODEL, TRAIN


@pytest.mark.ranks
def test_under_a_policy_the_planner_chooses_among_the_slices_in_which_it_fits() -> None:
    """Every fitting option has a cost with copies and recomputation. Less memory leaves fewer options."""
    given = [*MODEL, *TRAIN, "--cpu", *f"{CHOSEN} BUDGET --host-memory-gb 0.1 --hdp-learn-costs off".split()]

    def config(budget: str, words: str) -> Any:
        words_of_line = [budget if word == "BUDGET" else word for word in given]
        return resolved(4, *words_of_line, *words.split()).features["activations"]

    ample = config("0.01", "--activation-policy priced")
    states = max(stage_state_bytes(ample.decision.setup)) / 1e9
    tight = config(f"{states + 0.0009}", "--activation-policy priced")
    swapping = config("0.01", "--swap-fraction 1 --link-gb-per-second 0.001")
    assert 0 < len(tight.choice.fitting) < len(ample.choice.fitting) == len(ample.choice.slicings)
    kept = {slicing.kept_tokens / 256 for slicing in ample.choice.slicings}
    assert kept == set(KEPT_SHARES)
    for slicing in tight.choice.slicings:
        fits = slicing in tight.choice.options
        assert fits == (under_policy(tight.decision.setup, slicing) is not None)
    free, slow = (one.choice.fitting[0].slowest for one in (ample, swapping))
    assert slow.forward.b > 10 * free.forward.b
    assert slow.backward.b > 10 * free.backward.b
    chosen = tight.choice.options[-1]
    of_step = tight.in_slices(chosen)
    assert of_step.plan(of_step.largest).swap + of_step.plan(of_step.largest).recompute > 0
    assert of_step.described().startswith("> bytescale: activations priced: swapped")
    assert f"{len(tight.choice.fitting)} of {len(tight.choice.slicings)} combinations" in tight.described()


def test_micro_batches_of_a_step() -> None:
    """Samples are counted. The number of documents is estimated as if all had the largest length."""
    samples = parsed(global_batch_size=64, micro_batch_size=2, data_parallel_size=4)
    assert setup_of(samples).sequences.micro_batches == 8
    documents = parsed("--hybrid-data-parallel", "--hdp-tokens-per-rank", "4096", global_batch_size=64, world_size=4)
    assert setup_of(documents).sequences.micro_batches == 64 * 8192 // (4 * 4096)


def test_memories_of_n_grams_are_parameters_of_their_stages() -> None:
    words = "--ngram-layers 1,8 --ngram-rows 1000 --ngram-dim 8 --ngram-orders 2 --ngram-heads 1".split()
    stages = {"pipeline_model_parallel_size": 2, "world_size": 2}
    assert setup_of(parsed(*words, **stages)).states.added_parameters == (1000 * 8 + 2 * 1024 * 8,) * 2
    in_host = setup_of(parsed(*words, "--host-tables", "ngram", **stages))
    assert in_host.states.added_parameters == (2 * 1024 * 8,) * 2


def test_states_that_megatron_offloads_are_not_on_the_device() -> None:
    whole, half = (
        stage_state_bytes(setup_of(parsed(optimizer_cpu_offload=share > 0, optimizer_offload_fraction=share)))[0]
        for share in (0.0, 0.5)
    )
    assert half == pytest.approx(whole * 12 / 18)


@pytest.mark.parametrize("has_file", [False, True])
def test_what_runs_again_in_the_backward_pass_takes_time(has_file: bool, tmp_path: Path) -> None:
    """Cost files have no second forward passes, so the same file fits runs with and without recomputation."""
    plain = setup_of(parsed()).cost
    write_cost(tmp_path / "cost.json", plain)
    words = ["--cost-file", str(tmp_path / "cost.json")] if has_file else []
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    recomputed = setup_of(parsed(*words, **full))
    assert recomputed.cost.backward == plain.backward + plain.forward
    assert recomputed.cost.head_backward == plain.head_backward
    chunked = setup_of(parsed(*words, "--chunked-cross-entropy", "64"))
    assert chunked.cost.head_backward == plain.head_backward + plain.head_forward
    assert chunked.cost.backward == plain.backward
    for setup in (recomputed, chunked):
        file = cost_of_file(setup)
        assert file.backward.b == pytest.approx(plain.backward.b)
        assert file.head_backward == pytest.approx(plain.head_backward)
