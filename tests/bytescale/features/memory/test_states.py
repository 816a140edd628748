"""``--state-policy``: what is resolved, and what is refused before anything is built."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.memory.model_states import num_parameters
from bytescale_ext.plan.states.pages import MEBIBYTE
from megatron.bytescale import features
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.features.memory import states
from megatron.bytescale.features.memory.states import REFUSALS, has_fused_adam
from tests.bytescale.features.memory.test_activations import SHAPE, parsed

PAGED = ("--state-policy", "paged")
OPTIMIZER = {"use_distributed_optimizer": False}


@pytest.fixture(autouse=True)
def much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "free_host_bytes", lambda: 10**12)


def config_of(*words: str, **settings: Any) -> StateConfig:
    args = parsed(*words, **{**OPTIMIZER, **settings})
    features.check(args)
    return resolve(args).get(StateConfig)


def least_gb(*words: str, **settings: Any) -> float:
    """Return the least host memory that works, as the refusal of less names it."""
    with pytest.raises(ValueError, match="raise --state-host-gb") as caught:
        config_of(*PAGED, "--state-host-gb", "0.01", *words, **settings)
    found = re.search(r"take ([\d.]+) GB", str(caught.value))
    assert found
    return float(found[1])


def test_off_by_default() -> None:
    assert resolve(parsed()).find(StateConfig) is None
    assert resolve(parsed("--state-policy", "resident")).find(StateConfig) is None


def test_pages_and_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "free_host_bytes", lambda: 8_000_000_000)
    assert config_of(*PAGED) == StateConfig(4 * MEBIBYTE, 8e9)
    assert config_of(*PAGED, "--state-host-gb", "6", "--state-page-mb", "0.5") == StateConfig(MEBIBYTE // 2, 6e9)
    assert config_of(*PAGED, "--state-host-gb", "9").host_bytes == 8e9
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"there are 4 GB"):
        config_of(*PAGED, tensor_model_parallel_size=1, num_layers=40)


def test_what_is_given_to_activations_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "free_host_bytes", lambda: 8_000_000_000)
    both = (*PAGED, "--activation-policy", "memo", "--host-memory-gb", "1.5")
    assert config_of(*both).host_bytes == 6.5e9


def test_the_refusal_names_the_least_that_works() -> None:
    least = least_gb()
    assert least == pytest.approx(12 * num_parameters(SHAPE) / 1e9, rel=0.05)
    assert config_of(*PAGED, "--state-host-gb", str(least)).host_bytes == least * 1e9
    with pytest.raises(ValueError, match="raise --state-host-gb"):
        config_of(*PAGED, "--state-host-gb", str(least - 0.001))


def test_what_a_process_holds_follows_the_layout() -> None:
    whole = least_gb()
    in_float32 = least_gb(params_dtype=torch.float32)
    assert in_float32 == pytest.approx(whole * 8 / 12, rel=0.05)
    shared = least_gb(use_distributed_optimizer=True, data_parallel_size=4, world_size=4)
    assert shared == pytest.approx(whole / 4, rel=0.15)
    staged = least_gb(pipeline_model_parallel_size=2, world_size=2)
    assert whole / 2 < staged < 0.6 * whole
    tied = least_gb(untie_embeddings_and_output_weights=False)
    assert whole - tied == pytest.approx(12 * SHAPE.vocab * SHAPE.hidden / 1e9, rel=0.1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--state-host-gb", "1"), "--state-host-gb needs --state-policy paged"),
        (("--state-page-mb", "1"), "--state-page-mb needs --state-policy paged"),
        ((*PAGED, "--state-host-gb", "-1"), "--state-host-gb -1 is not an amount of memory"),
        ((*PAGED, "--state-host-gb", "nan"), "--state-host-gb nan is not an amount of memory"),
        ((*PAGED, "--state-page-mb", "0"), "--state-page-mb 0 must be at least 0.00390625"),
        ((*PAGED, "--state-page-mb", "inf"), "--state-page-mb inf must be at least"),
    ],
)
def test_bad_values(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        config_of(*words)


SETTINGS: dict[str, Any] = {"--optimizer": "sgd"}


@pytest.mark.parametrize("row", REFUSALS[:-1], ids=lambda row: row.flag)
def test_settings_that_do_not_go_with_pages(row: Any) -> None:
    dest = row.flag.removeprefix("--").replace("-", "_")
    args = parsed(*PAGED, **OPTIMIZER, **{dest: SETTINGS.get(row.flag, True)})
    with pytest.raises(ValueError, match=f"^--state-policy does not work with {row.flag}: "):
        refuse_conflicts(args, {"states": "--state-policy"}, REFUSALS)
    refuse_conflicts(parsed(*PAGED, **OPTIMIZER), {"states": "--state-policy"}, REFUSALS)


def test_another_adam_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_fused_adam(None)
    monkeypatch.setattr(states.importlib.util, "find_spec", lambda name: name == "apex" or None)
    with pytest.raises(ValueError, match="does not work with the Adam of TransformerEngine or Apex: Megatron takes it"):
        refuse_conflicts(parsed(*PAGED), {"states": "--state-policy"}, REFUSALS)
