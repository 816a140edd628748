"""Feature table: names, flags and rows are consistent, and flags of disabled features are refused."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest

from bytescale_ext.config.run import RunConfig
from megatron.bytescale import features
from megatron.bytescale.arguments.conditions import given
from megatron.bytescale.arguments.options import Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature


def feature_of(name: str, **changes: Any) -> Feature[Any]:
    """Return a feature with a switch and one further flag, which builds nothing."""

    def add_arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(f"--{name}", action="store_true")
        parser.add_argument(f"--{name}-size", type=int)

    def resolve(options: Any, run: RunConfig) -> object:
        return getattr(options, f"{name}_size")

    options = dataclasses.make_dataclass("Options", [(f"{name}_size", int | None)], frozen=True)
    made = Feature(name, f"--{name}", "for tests", add_arguments, given(name), options, resolve,
                   lambda training, runtime: training)  # fmt: skip
    return dataclasses.replace(made, **changes)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*rows: Feature[Any]) -> None:
        monkeypatch.setattr(features, "FEATURES", rows)
        monkeypatch.setattr(features, "REFUSALS", ())  # these need arguments of Megatron
        monkeypatch.setattr(features, "POSITION_REFUSALS", ())
        monkeypatch.setattr(features, "UNUSED_REFUSALS", ())

    return use


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cost-file")
    for feature in features.FEATURES:
        feature.add_arguments(parser)
    return parser.parse_args(words)


def test_names_and_flags_are_unique() -> None:
    names = [feature.name for feature in features.FEATURES]
    flags = [action.option_strings[0] for feature in features.FEATURES for action in feature.actions()]
    assert len(set(names)) == len(names)
    assert len(set(flags)) == len(flags)


@pytest.mark.parametrize("feature", features.FEATURES, ids=lambda feature: feature.name)
def test_the_switch_is_one_of_its_flags_and_off_by_default(feature: Feature[Any]) -> None:
    # Megatron's parser adds some flags.
    is_of_megatron = feature.flag in ("--sft", "--moe-use-upcycling", "--mtp-num-layers", "--fp8-format", "--qk-clip")
    assert is_of_megatron or feature.flag in [action.option_strings[0] for action in feature.actions()]
    assert not feature.is_on(parsed())
    assert set(feature.requires) <= {other.name for other in features.FEATURES}


def test_a_flag_needs_its_feature(table: Any) -> None:
    table(feature_of("one"), feature_of("two", needs="--two of any size"))
    features.check(parsed("--one", "--one-size", "3"))
    with pytest.raises(ValueError, match=r"^--one-size needs --one$"):
        features.check(parsed("--one-size", "3"))
    with pytest.raises(ValueError, match=r"^--two-size needs --two of any size$"):
        features.check(parsed("--one", "--two-size", "3"))


def test_a_feature_may_require_another(table: Any) -> None:
    table(feature_of("one"), feature_of("two", requires=("one",)))
    features.check(parsed("--one", "--two"))
    features.check(parsed("--one"))
    with pytest.raises(ValueError, match=r"^--two needs --one$"):
        features.check(parsed("--two"))


def test_costs_need_a_feature_that_reads_them(table: Any) -> None:
    table(feature_of("one"), feature_of("two", reads_cost=True), feature_of("three", reads_cost=True))
    features.check(parsed("--two", "--cost-file", "cost.json"))
    with pytest.raises(ValueError, match=r"^--cost-file needs --two or --three$"):
        features.check(parsed("--one", "--cost-file", "cost.json"))


def test_refusals_come_before_settings(table: Any) -> None:
    def before_checks(args: Any) -> Overrides:
        return {"two": True}

    row = refuse("--two", "one")
    table(feature_of("one", before_checks=before_checks, refusals=(row,)), feature_of("two"))
    args = parsed("--one")
    features.check(args)
    assert args.two
    with pytest.raises(ValueError, match=r"^--one does not work with --two: remove it, or train without --one$"):
        features.check(parsed("--one", "--two"))
    assert features.refusals() == [row]


def test_patches_of_enabled_features_only(table: Any) -> None:
    rows = ("first", "second")
    table(feature_of("one", patches=lambda: rows), feature_of("two"))
    assert features.patches_of(["one", "two"]) == list(rows)
    assert features.patches_of(["two"]) == []
