"""Imports go one way: rooms and floors of plan/, no cycle, and Megatron only in megatron/."""

from __future__ import annotations

import re
import sys

import pytest

from tests.exceptions import IN_A_CYCLE
from tests.tree import (
    MODULES,
    SOURCE,
    drawing,
    floors,
    for_each,
    imports_of,
    is_under,
    nodes_in_cycles,
    room_arrows,
    runtime_imports,
    text_of,
)

MAX_FLOORS = 7
# Rooms of plan/, lowest first. A room imports from rooms on its floor and below.
FLOORS = (("step",), ("cost",), ("schedule",), ("hdp", "activation", "memory", "states", "experts", "sculpt"),
          ("evaluate", "library"), ("setup",), ("search",))  # fmt: skip
FLOOR_OF = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}


@for_each(SOURCE)
def test_imports_go_one_way(name: str) -> None:
    for module in imports_of(name):
        assert not is_under(module, "tests"), module
        assert not is_under(module, "pretrain_gpt_hdp") or name == "megatron/bytescale/train.py", module
        if is_under(module, "megatron") and not is_under(module, "megatron.bytescale"):
            assert name == "pretrain_gpt_hdp.py" or name.startswith("megatron/bytescale/"), module
        if name.startswith("bytescale_ext/"):
            assert not is_under(module, "megatron"), module
        if name.startswith("bytescale_ext/plan/"):
            solver = ("ortools",) if name.endswith(("exact.py", "limit.py")) else ()  # inside one function, to certify
            own = ("bytescale_ext.plan", "bytescale_ext.errors", "bytescale_ext.json_input")
            allowed = is_under(module, "numpy", *own, *solver)
            assert allowed or module.split(".")[0] in sys.stdlib_module_names, module


@for_each(SOURCE)
def test_megatrons_arguments_are_read_at_its_border_only(name: str) -> None:
    calls = re.findall(r"\bget_args\(", text_of(name))
    assert not calls or name.startswith("megatron/bytescale/arguments/")


@for_each([name for name in SOURCE if name.startswith("scripts/") and text_of(name).startswith("#!")])
def test_scripts_that_import_others_run_as_files(name: str) -> None:
    modules = imports_of(name)
    if any(is_under(module, folder) for module in modules for folder in ("scripts", "tests")):
        assert "sys.path.insert(0, str(ROOT))" in text_of(name)


@for_each([name for name in SOURCE if "/bytescale/core/" in name])
def test_core_never_imports_training(name: str) -> None:
    assert not [one for one in imports_of(name) if is_under(one, "megatron.bytescale.training")]


@pytest.mark.parametrize("in_functions", [False, True])
def test_no_module_imports_itself_through_others(in_functions: bool) -> None:
    imports = {module: runtime_imports(name, in_functions) for module, name in MODULES.items()}
    allowed = IN_A_CYCLE if in_functions else set()
    assert nodes_in_cycles(imports) - allowed == set(), "import cycle"
    assert not in_functions or IN_A_CYCLE - nodes_in_cycles(imports) == set(), "these modules need no exception"


def test_cycles_are_found() -> None:
    assert nodes_in_cycles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}
    assert nodes_in_cycles({"a": {"b"}, "b": set()}) == set()


def test_rooms_of_the_plan_import_downwards() -> None:
    arrows = room_arrows()
    assert arrows.keys() <= FLOOR_OF.keys()
    upwards = [
        (room, target) for room, below in arrows.items() for target in below if FLOOR_OF[target] > FLOOR_OF[room]
    ]
    assert upwards == []
    assert max(floors(arrows).values()) <= MAX_FLOORS


def test_the_drawing_of_rooms() -> None:
    """``python -m tests.tree`` prints it."""
    lines = drawing().splitlines()
    assert len(lines) == len(room_arrows()) >= 7
    assert lines[-1].split() == ["1", "step"]
    assert all(re.fullmatch(r"[1-7]  \w+( +-> \w+(, \w+)*)?", line) for line in lines)
