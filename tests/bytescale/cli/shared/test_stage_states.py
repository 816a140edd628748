"""Model states of each stage of a launch line, and how they were chosen in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.config.memory.states import ResidentStates, StateConfig
from bytescale_ext.plan.memory.model_states import num_parameters
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.cli.shared.stage_states import IN_HOST, choice_text, state_bytes
from tests.bytescale.features.activations.test_flags import SHAPE, parsed
from tests.bytescale.features.states.test_flags import OPTIMIZER

NOTE = "> bytescale: states auto (why): resident: 2 s\n> bytescale: states auto, what else fits: nothing"
ARGS = parsed(**OPTIMIZER, expert_tensor_parallel_size=1, expert_model_parallel_size=1)
RUN = resolve(ARGS)


def test_resident_states_are_all_on_the_device() -> None:
    assert state_bytes(ARGS, RUN, [100.0]) == [{"states": 1800.0}]


@pytest.mark.parametrize(("stage", "on_device", "in_pages"), [(1, 6, 12), (2, 2, 16)])
def test_states_in_pages_follow_what_was_resolved(stage: int, on_device: int, in_pages: int) -> None:
    """The stage of the configuration counts, not that of the flags, which is not given where it was chosen."""
    run = replace(RUN, features={"states": StateConfig(4096, 1e12, None, stage)})
    (row,) = state_bytes(ARGS, run, [])
    assert row["states"] == on_device * num_parameters(SHAPE)
    assert row["pages"] == pytest.approx(in_pages * num_parameters(SHAPE), rel=0.01)
    assert "pages" in IN_HOST


def test_a_choice_in_words() -> None:
    assert choice_text(RUN) == {}
    assert choice_text(replace(RUN, features={"states": StateConfig(4096, 1e12)})) == {}
    expected = {"model states": "(why): resident: 2 s", "or": "what else fits: nothing"}
    for found in (ResidentStates(NOTE), StateConfig(4096, 1e12, note=NOTE)):
        assert choice_text(replace(RUN, features={"states": found})) == expected
