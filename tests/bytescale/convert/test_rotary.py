"""Conversion of rotary positions to Megatron's flags and back. Positions that one side lacks are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.bytescale.convert.rotary import (
    RotaryArguments,
    of_every_version,
    position_flags,
    rope_of,
    rope_parameters,
)
from tests.bytescale.convert.models import LINEAR_ROPE, LLAMA3, PLAIN_ROPE, YARN

MSCALE = {"mscale": 0.707, "mscale_all_dim": 0.707}
CASES: dict[str, dict[str, Any]] = {
    "plain": PLAIN_ROPE,
    "linear": LINEAR_ROPE,
    "fractions": {**LINEAR_ROPE, "rope_theta": 10000.5, "factor": 2.5},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn of gpt-oss": {**YARN, "rope_theta": 150000.0, "factor": 32.0, "truncate": False},
    "yarn with other limits": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 8192},
    "scaled yarn": {**YARN, **MSCALE},
}
LATENT = ("plain", "yarn", "scaled yarn")


def parsed(words: list[str], is_latent: bool) -> RotaryArguments:
    """Return Megatron's arguments of these flags."""
    found: dict[str, Any] = {
        "position_embedding_type": "learned_absolute", "rope_type": None, "rotary_scaling_factor": 1.0,
        "mscale": 1.0, "mscale_all_dim": 0.0, "use_rope_scaling": False, "rope_scaling_factor": 8.0,
        "rotary_seq_len_interpolation_factor": None, "yarn_beta_fast": None, "yarn_beta_slow": None,
        "yarn_original_max_position_embeddings": None, "yarn_correction_range_round_to_int": None,
        "multi_latent_attention": is_latent,
    }  # fmt: skip
    switches = {"--use-rope-scaling": True, "--no-yarn-correction-range-round-to-int": False}
    for place, word in enumerate(words):
        name = word.removeprefix("--").removeprefix("no-").replace("-", "_")
        if word in switches:
            found[name] = switches[word]
        elif word.startswith("--"):
            text = words[place + 1]
            found[name] = float(text) if text[0].isdigit() else text
    return RotaryArguments(**found)


@pytest.mark.parametrize("name", CASES)
def test_positions_come_back(name: str) -> None:
    words = position_flags(CASES[name], is_latent=False, is_partial=False)
    assert rope_parameters(parsed(words, is_latent=False)) == CASES[name]
    assert "--rope-type" not in words
    assert ("yarn" in words) == (CASES[name]["rope_type"] == "yarn")


@pytest.mark.parametrize("name", LATENT)
def test_positions_of_latent_attention_come_back(name: str) -> None:
    words = position_flags(CASES[name], is_latent=True, is_partial=False)
    assert rope_parameters(parsed(words, is_latent=True)) == CASES[name]
    assert words[words.index("--position-embedding-type") + 1] == "rope"
    assert words[words.index("--rope-type") + 1] == ("rope" if name == "plain" else "yarn")


@pytest.mark.parametrize("name", sorted(CASES.keys() - set(LATENT)))
def test_latent_attention_has_fewer(name: str) -> None:
    with pytest.raises(ValueError, match="rotary positions"):
        position_flags(CASES[name], is_latent=True, is_partial=False)


@pytest.mark.parametrize(
    "changes",
    [{"factor": None}, {"attention_factor": 1.2}, {"mscale": 0.7}, {"mscale_all_dim": 0.7}, {"rope_type": "dynamic"}],
)
def test_what_megatron_has_not_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"rotary positions .* cannot be converted"):
        position_flags({**YARN, **changes}, is_latent=False, is_partial=False)


@pytest.mark.parametrize("scales", [(0.7, 0.0), (1.0, 0.0), (0.0, 1.0)])
def test_scales_that_transformers_has_not_are_refused(scales: tuple[float, float]) -> None:
    rotary = parsed(position_flags(YARN, is_latent=False, is_partial=False), is_latent=False)
    rotary = replace(rotary, mscale=scales[0], mscale_all_dim=scales[1])
    if scales == (1.0, 0.0):
        assert rope_parameters(rotary) == YARN
        return
    with pytest.raises(ValueError, match=f"YaRN with mscale {scales[0]} and mscale_all_dim {scales[1]}"):
        rope_parameters(rotary)


YARN_OF_4 = {name: value for name, value in YARN.items() if name not in ("rope_theta", "rope_type")}
FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "version 5": ({"rope_parameters": YARN}, YARN),
    "version 4": ({"rope_theta": 10000.0, "rope_scaling": {**YARN_OF_4, "rope_type": "yarn"}}, YARN),
    "before 4.43": ({"rope_theta": 10000.0, "rope_scaling": {**YARN_OF_4, "type": "yarn"}}, YARN),
    "both": ({"rope_theta": 10000.0, "rope_scaling": YARN, "rope_parameters": YARN}, YARN),
    "no base": ({}, {"rope_type": "default", "rope_theta": 5e5}),
    "base alone": ({"rope_theta": 1e6, "rope_scaling": None}, {"rope_type": "default", "rope_theta": 1e6}),
    "base outside": (
        {"rope_theta": 1e6, "rope_parameters": {"type": "linear", "factor": 4.0}},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    ),
    "no original length": (
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 1024},
    ),
    "length outside": (
        {"original_max_position_embeddings": 512, "rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 512},
    ),
    "a part": (
        {"partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_all_versions_are_read(name: str) -> None:
    raw, wanted = FILES[name]
    assert rope_of(raw, 5e5, 1024) == wanted


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read_equally_by_all_versions(name: str) -> None:
    written = of_every_version(CASES[name])
    old = {key: written[key] for key in ("rope_theta", "rope_scaling")}
    new = {"rope_parameters": written["rope_parameters"]}
    assert rope_of(old, 1.0, 1) == rope_of(new, 1.0, 1) == rope_of(written, 1.0, 1) == CASES[name]


def test_positions_that_differ_between_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="Megatron has one kind for all layers"):
        rope_of({"rope_parameters": {"full_attention": PLAIN_ROPE}}, 1e4, 1024)
