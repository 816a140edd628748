"""Arguments as typed values, and conditions on them."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass

import pytest

from megatron.bytescale.arguments.conditions import above, chosen, equals, given, where
from megatron.bytescale.arguments.options import options_of, override


@dataclass(frozen=True)
class Sizes:
    hidden_size: int
    kv_channels: int | None = None


def test_fields_are_arguments_of_the_same_names() -> None:
    assert options_of(Namespace(hidden_size=8, kv_channels=4, num_layers=2), Sizes) == Sizes(8, 4)


def test_only_fields_with_a_default_may_be_missing() -> None:
    assert options_of(Namespace(hidden_size=8), Sizes) == Sizes(8)
    with pytest.raises(AttributeError, match="hidden_size"):
        options_of(Namespace(kv_channels=4), Sizes)


def test_overrides_set_arguments() -> None:
    args = Namespace(hidden_size=8)
    override(args, {"hidden_size": 16, "kv_channels": 4})
    assert options_of(args, Sizes) == Sizes(16, 4)


@pytest.mark.parametrize(
    ("value", "is_given", "is_chosen"),
    [(None, False, False), (False, False, False), (0, False, True), ("", False, True), (3, True, True)],
)
def test_zero_is_chosen_but_not_given(value: object, is_given: bool, is_chosen: bool) -> None:
    args = Namespace(flag=value)
    assert (given("flag")(args), chosen("flag")(args)) == (is_given, is_chosen)


def test_an_argument_that_no_parser_has_set_is_none() -> None:
    args = Namespace()
    assert not given("flag")(args)
    assert not chosen("flag")(args)
    assert not above("flag", 1)(args)
    assert equals("flag", None, 1)(args)


def test_conditions_combine() -> None:
    both = given("one") & above("two", 1)
    assert [both(Namespace(one=one, two=two)) for one, two in ((1, 2), (1, 1), (0, 2))] == [True, False, False]
    either = given("one") | equals("two", "a", "b")
    assert [either(Namespace(one=one, two=two)) for one, two in ((1, "c"), (0, "b"), (0, "c"))] == [True, True, False]
    assert (~given("one"))(Namespace(one=0))


def test_a_condition_on_typed_values() -> None:
    is_narrow = where(Sizes, lambda sizes: (sizes.kv_channels or 0) < sizes.hidden_size)
    assert is_narrow(Namespace(hidden_size=8, kv_channels=4))
    assert not is_narrow(Namespace(hidden_size=8, kv_channels=8))
    unread = given("hidden_size") & is_narrow
    assert not unread(Namespace()), "the second condition is not looked at"
