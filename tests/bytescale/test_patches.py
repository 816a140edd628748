"""The table against the installed Megatron, and what a run really replaces in it."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.training import HDP, MODEL, TRAIN, write_documents
from tests.harness import preload, run_ranks

ROOT = Path(__file__).resolve().parents[2]
FUNCTIONS = [
    "compile_helpers",
    "set_jit_fusion_options",
    "get_forward_backward_func",
    "get_forward_backward_func",
    "training_log",
    "get_megatron_optimizer",
]
ALWAYS_REPLACED = {"megatron.core.datasets.utils.compile_helpers"}
REPLACED = ALWAYS_REPLACED | {
    "megatron.training.initialize.set_jit_fusion_options",
    "megatron.training.training.set_jit_fusion_options",
    "megatron.core.pipeline_parallel.schedules.get_forward_backward_func",
    "megatron.core.pipeline_parallel.get_forward_backward_func",
    "megatron.training.training.get_forward_backward_func",
    "megatron.training.training.training_log",
    "megatron.core.optimizer.get_megatron_optimizer",
    "megatron.training.training.get_megatron_optimizer",
}


@pytest.fixture(scope="module", autouse=True)
def megatron_in_the_fork_server() -> None:
    preload("tests.e2e.preload")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs", copies=1)


def check_table(rank: int, world: int) -> list[str]:
    from megatron.bytescale.patches import ALWAYS, PATCHES
    from megatron.bytescale.registry import check, resolve

    for patch in PATCHES:
        check(patch)
        _, attribute, function = resolve(patch.target)
        # No module that the training imports holds the function unless the row says so.
        holders = {name for name, module in list(sys.modules.items())
                   if name.startswith("megatron.") and vars(module).get(attribute) is function}  # fmt: skip
        assert holders == {patch.target.partition(":")[0], *patch.aliases}
        assert (patch.feature.startswith("--") or patch.feature == ALWAYS) and len(patch.why) > 20
    return [patch.target.partition(":")[2] for patch in PATCHES]


def test_rows_fit_the_installed_megatron_and_name_every_holder() -> None:
    assert run_ranks(check_table, 1, init_group=False) == [FUNCTIONS]
    assert len(FUNCTIONS) <= 8


def callables_of_megatron() -> dict[str, Any]:
    """Every function, class and method in the modules of Megatron that are imported, by the name it is found under."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith(("megatron.core", "megatron.training")) or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value):
                found[f"{name}.{attribute}"] = value
            if inspect.isclass(value) and value.__module__ == name:
                members = {key: member for key, member in vars(value).items() if callable(member)}
                found.update({f"{name}.{attribute}.{key}": member for key, member in members.items()})
    return found


def replaced_by_main(rank: int, world: int, argv: list[str]) -> tuple[set[str], list[str]]:
    """Run ``pretrain_gpt_hdp.main`` up to ``pretrain``: what it replaced in Megatron, and the table then."""
    import megatron.training

    import pretrain_gpt_hdp
    from megatron.bytescale import status

    called = []
    megatron.training.pretrain = lambda *args, **kwargs: called.append(args)
    before = callables_of_megatron()
    sys.argv = argv
    pretrain_gpt_hdp.main()
    assert len(called) == 1 and len(before) > 1000
    after = callables_of_megatron()
    changed = {name for name, value in before.items() if name in after and after[name] is not value}
    return changed | (before.keys() - after.keys()), status()


def run_main(corpus: Path, *flags: str) -> tuple[set[str], list[str]]:
    argv = ["pretrain_gpt_hdp.py", *MODEL, *TRAIN, "--data-path", str(corpus), *flags]
    return run_ranks(replaced_by_main, 1, argv)[0]


def test_without_the_flag_only_what_the_wheel_lacks_is_replaced(corpus: Path) -> None:
    changed, table = run_main(corpus, "--micro-batch-size", "1")
    assert changed == ALWAYS_REPLACED
    assert all((" replaced " if "compile_helpers" in row else " untouched ") in row for row in table)


def test_the_flag_replaces_what_the_table_says_and_nothing_else(corpus: Path) -> None:
    changed, table = run_main(corpus, *HDP, "--hdp-tokens-per-rank", "256")
    assert changed == REPLACED
    assert all(" replaced " in row for row in table)


def install_and_uninstall(rank: int, world: int) -> None:
    from megatron.bytescale import install, status

    before = callables_of_megatron()
    for runtime, replaced in ((None, ALWAYS_REPLACED), (object(), REPLACED)):
        installation = install(runtime)  # type: ignore[arg-type]
        assert set(installation.names()) == replaced
        assert sum(" replaced " in row for row in status()) == (1 if runtime is None else len(FUNCTIONS))
        installation.uninstall()
    after = callables_of_megatron()
    assert all(after[name] is value for name, value in before.items())
    assert all(" untouched " in row for row in status())


def test_uninstall_restores_megatron() -> None:
    run_ranks(install_and_uninstall, 1, init_group=False)


@pytest.mark.timeout(150)
def test_the_module_prints_the_table() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "megatron.bytescale"], cwd=ROOT, capture_output=True, text=True, timeout=140,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert [line.split()[0] for line in lines] == FUNCTIONS
    assert all("untouched" in line for line in lines)
    features = ["always: ", *["--hybrid-data-parallel: "] * 2, "--seq1f1b-splits: ", *["--hybrid-data-parallel: "] * 2]
    assert all(feature in line for feature, line in zip(features, lines, strict=True))
