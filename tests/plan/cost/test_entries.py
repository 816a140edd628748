"""Dataclasses from the entries of a JSON object."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.entries import entries_of, from_entries
from bytescale_ext.plan.cost.model_shape import LLAMA_7B, ModelShape

JSON_VALUES = ([], [1], "text", 3, 1.5, True, None)


@pytest.mark.parametrize("value", [LLAMA_7B, CostModel(1.0, 2.0, 3.0, 4.0, 5.0)])
def test_a_value_comes_back_from_its_json(value: object) -> None:
    assert from_entries(type(value), json.loads(json.dumps(asdict(value)))) == value  # type: ignore[call-overload]


@pytest.mark.parametrize("name", ["hidden", "gated", "vocab"])
def test_a_missing_entry_is_named(name: str) -> None:
    entries = asdict(LLAMA_7B)
    del entries[name]
    with pytest.raises(TypeError, match=f"'{name}'"):
        from_entries(ModelShape, entries)


@pytest.mark.parametrize("value", JSON_VALUES, ids=repr)
def test_only_objects_have_entries(value: object) -> None:
    with pytest.raises(TypeError, match=f"a {type(value).__name__} instead of an object with entries"):
        from_entries(ModelShape, value)
    with pytest.raises(TypeError, match="instead of an object with entries"):
        entries_of(value)
    assert entries_of({"a": value}) == {"a": value}
