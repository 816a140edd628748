"""Table of patches against the installed Megatron, and against the replacements of a run."""

from __future__ import annotations

import ast
import gc
import inspect
import json
import os
import re
import subprocess
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.corpora import write_documents
from tests.e2e.training import HDP, MODEL, TRAIN, train, train_with
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
SCHEDULE_ROWS = {
    "forward_backward_pipelining_without_interleaving": "slices",
    "forward_backward_pipelining_with_interleaving": "slices",
    "forward_step": "slices",
    "backward_step": "slices",
    "get_pp_rank_microbatches": "slices",
}
CPU_ROWS = {"_get_cuda_rng_state": "cpu", "_set_cuda_rng_state": "cpu", "_warmup_jit_function": "cpu"}
FEATURES = {
    "compile_helpers": "always",
    **CPU_ROWS,
    "set_jit_fusion_options": "hdp",
    "check_checkpoint_args": "hdp, sculpt",
    "get_forward_backward_func": "hdp, slices",
    **SCHEDULE_ROWS,
    "training_log": "hdp",
    "get_megatron_optimizer": "hdp, states, qk_clip",
    "DistributedOptimizer._set_main_param_and_optimizer_states": "hdp, states, qk_clip",
    "ChainedOptimizer.load_state_dict": "hdp, states, qk_clip",
    "clip_qk": "qk_clip",
    "clip_grad_by_total_norm_fp32": "states",
    "mtp_block_spec": "multi_token",
    "_ParamAndGradBuffer.__init__": "states",
}
# (class, features) of each row with a subclass
SPECIALIZED = [
    ("Float16OptimizerWithFloat16Params", "states"),
    ("DistributedOptimizer", "states"),
    ("FP32Optimizer", "states"),
    ("Float16OptimizerWithFloat16Params", "states"),
    ("DistributedOptimizer", "states"),
    ("_ParamAndGradBuffer", "states"),
    ("_ParamAndGradBucketGroup", "states"),
    ("_ParamAndGradBucketGroup", "hdp"),
    ("DistributedDataParallel", "states"),
    ("MultiTokenPredictionLayer", "multi_token"),
]
ALWAYS_REPLACED = {"megatron.core.datasets.utils.compile_helpers"}
SLICES_REPLACED = ALWAYS_REPLACED | {
    "megatron.core.pipeline_parallel.schedules.get_forward_backward_func",
    "megatron.core.pipeline_parallel.get_forward_backward_func",
    "megatron.training.training.get_forward_backward_func",
}
OPTIMIZER_REPLACED = ALWAYS_REPLACED | {
    "megatron.core.optimizer.get_megatron_optimizer",
    "megatron.training.training.get_megatron_optimizer",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states",
    "megatron.core.optimizer.optimizer.ChainedOptimizer.load_state_dict",
}
STATES_REPLACED = OPTIMIZER_REPLACED | {
    "megatron.core.distributed.param_and_grad_buffer._ParamAndGradBuffer.__init__",
    *(
        f"megatron.core.{module}.clip_grad_by_total_norm_fp32"
        for module in ("optimizer.clip_grads", "optimizer.optimizer", "models.mimo.optimizer")
    ),
}
CLIP_REPLACED = OPTIMIZER_REPLACED | {
    "megatron.core.optimizer.qk_clip.clip_qk",
    "megatron.training.training.clip_qk",
}
REPLACED = (
    OPTIMIZER_REPLACED
    | SLICES_REPLACED
    | {
        "megatron.training.initialize.set_jit_fusion_options",
        "megatron.training.training.set_jit_fusion_options",
        "megatron.training.checkpointing.check_checkpoint_args",
        "megatron.training.training.training_log",
    }
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs", copies=1)


def check_table(rank: int, world: int) -> list[tuple[str, str]]:
    from megatron.bytescale.patches import PATCHES
    from megatron.bytescale.registry import check_patch, resolve_target, subclass_of
    from tests.e2e.preload import STAND_INS

    assert STAND_INS is not None
    STAND_INS.uninstall()
    for patch in PATCHES:
        check_patch(patch)
        assert len(patch.why) > 20
        owner, attribute, function = resolve_target(patch.target)
        if patch.subclass is not None:
            check_subclass(function, subclass_of(function, patch.subclass))
        if patch.wrap is None or isinstance(owner, type):
            continue
        # Only modules in the row refer to the function, among all modules that training imports.
        holders = {name for name, module in list(sys.modules.items())
                   if name.startswith("megatron.") and vars(module).get(attribute) is function}  # fmt: skip
        assert holders == {patch.target.partition(":")[0], *patch.aliases}
    return [(patch.target.partition(":")[2], ", ".join(patch.features)) for patch in PATCHES]


def check_subclass(kind: type, subclass: type) -> None:
    """An object of the class can become an object of the subclass, which overrides some methods."""
    assert subclass is not kind
    assert issubclass(subclass, kind)
    instance = kind.__new__(kind)
    instance.__class__ = subclass
    own = {name for base in subclass.__mro__[: subclass.__mro__.index(kind)] for name in vars(base)}
    assert any(callable(getattr(kind, name, None)) for name in own - set(vars(object)) - {"__init__"})


@pytest.mark.ranks
def test_rows_fit_the_installed_megatron_and_name_every_holder() -> None:
    found = run_ranks(check_table, 1, init_group=False)[0]
    assert found == [*FEATURES.items(), *SPECIALIZED]


def callables_of_megatron() -> dict[str, Any]:
    """Return every function, class and method in imported modules of Megatron, by qualified name."""
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
    """Run ``pretrain_gpt_hdp.main`` up to ``pretrain``; return its replacements in Megatron, and the table."""
    import megatron.training

    import pretrain_gpt_hdp
    from megatron.bytescale import status

    called = []
    megatron.training.pretrain = lambda *args, **kwargs: called.append(args)
    before = callables_of_megatron()
    sys.argv = argv
    pretrain_gpt_hdp.main()
    assert len(called) == 1
    assert len(before) > 1000
    after = callables_of_megatron()
    changed = {name for name, value in before.items() if name in after and after[name] is not value}
    return changed | (before.keys() - after.keys()), status()


def run_main(corpus: Path, *flags: str) -> tuple[set[str], list[str]]:
    argv = ["pretrain_gpt_hdp.py", *MODEL, *TRAIN, "--data-path", str(corpus), *flags]
    return run_ranks(replaced_by_main, 1, argv)[0]


def states(table: list[str]) -> dict[str, str]:
    """Return the state of each row by its function, without rows of classes."""
    return {name: state for name, state in (row.split()[:2] for row in table) if state != "specialized"}


def expected_states(replaced: set[str]) -> dict[str, str]:
    """Rows are replaced by feature, rows of schedules never, and rows of the CPU before the run begins."""
    by_feature = {
        name: "replaced" if any(full.endswith(f".{name}") for full in replaced) else "untouched" for name in FEATURES
    }
    return by_feature | dict.fromkeys(SCHEDULE_ROWS, "copied") | dict.fromkeys(CPU_ROWS, "replaced")


@pytest.mark.ranks
def test_without_the_flag_only_what_the_wheel_lacks_is_replaced(corpus: Path) -> None:
    changed, table = run_main(corpus, "--micro-batch-size", "1")
    assert changed == ALWAYS_REPLACED
    assert states(table) == expected_states(ALWAYS_REPLACED)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("flags", "replaced"),
    [
        ((*HDP, "--hdp-tokens-per-rank", "256"), REPLACED),
        ((*HDP, "--hdp-tokens-per-rank", "256", "--seq1f1b-slices", "2"), REPLACED),
        (("--micro-batch-size", "1", "--seq1f1b-slices", "2"), SLICES_REPLACED),
        (("--micro-batch-size", "1", "--state-policy", "paged"), STATES_REPLACED),
        (("--micro-batch-size", "1", "--seq1f1b-slices", "2", "--qk-clip"), SLICES_REPLACED | CLIP_REPLACED),
    ],
    ids=["hdp", "hdp in slices", "samples in slices", "samples, paged states", "samples in slices, clipped"],
)
def test_a_feature_replaces_what_the_table_says_and_nothing_else(
    flags: tuple[str, ...], replaced: set[str], corpus: Path
) -> None:
    changed, table = run_main(corpus, *flags)
    assert changed == replaced
    assert states(table) == expected_states(replaced)


def install_and_uninstall(rank: int, world: int) -> None:
    from megatron.bytescale import install, status
    from tests.e2e.preload import STAND_INS

    assert STAND_INS is not None
    before = callables_of_megatron()
    for features, replaced in (((), ALWAYS_REPLACED), (("hdp",), REPLACED), (("hdp", "slices"), REPLACED)):
        run = types.SimpleNamespace(features=features, find=lambda kind: None)
        runtime: Any = types.SimpleNamespace(run=run)
        installation = install(runtime)
        assert set(installation.names()) == replaced
        assert states(status()) == expected_states(replaced)
        installation.uninstall()
    after = callables_of_megatron()
    assert all(after[name] is value for name, value in before.items())
    STAND_INS.uninstall()
    assert not any(" replaced " in row for row in status())


@pytest.mark.ranks
def test_uninstall_restores_megatron() -> None:
    run_ranks(install_and_uninstall, 1, init_group=False)


def refuse_changed_rows(rank: int, world: int) -> None:
    """Another hash in any row, of any kind, is refused before anything is replaced."""
    from dataclasses import replace

    from megatron.bytescale import patches
    from megatron.bytescale.registry import Installation, Source
    from tests.e2e.preload import STAND_INS

    assert STAND_INS is not None
    STAND_INS.uninstall()
    before = callables_of_megatron()
    rows = patches.rows_of("always", "cpu", "hdp", "slices", "states", "multi_token", "qk_clip")
    assert tuple(rows) == patches.PATCHES
    for index, row in enumerate(rows):
        changed = [*rows[:index], replace(row, sources=(Source("0123456789ab", ("0.1",)),)), *rows[index + 1 :]]
        installation = Installation()
        with pytest.raises(ValueError, match=f"{row.target} of megatron-core .* has the source hash .*patches.py"):
            installation.install(changed, None)
        assert installation.names() == []
        now = callables_of_megatron()
        assert all(now[name] is value for name, value in before.items())


@pytest.mark.ranks
def test_a_changed_hash_of_any_row_refuses_before_anything_is_replaced() -> None:
    run_ranks(refuse_changed_rows, 1, init_group=False)


def replaced_on_instances() -> tuple[set[str], set[str]]:
    """Return (Megatron classes with instances, "Class.method" of each method that an instance has replaced)."""
    kinds, replaced = set(), set()
    for thing in gc.get_objects():
        kind = type(thing)
        if not str(kind.__module__).startswith(("megatron.core", "megatron.training", "megatron.bytescale.core")):
            continue
        kinds.add(kind.__name__)
        fields = getattr(kind, "__dataclass_fields__", {})  # a callable of a configuration is a hook
        replaced |= {
            f"{kind.__name__}.{name}"
            for name, value in getattr(thing, "__dict__", {}).items()
            if callable(value) and callable(getattr(kind, name, None)) and name not in fields
        }
        if kind.__name__ == "GPTModel":  # no layer spec names these modules
            replaced |= {
                f"GPTModel.{name}"
                for name, module in thing.named_children()
                if not type(module).__module__.startswith("megatron.core.")
            }
    return kinds, replaced


def scan_instances(runtime: Any, model: torch.nn.Module) -> None:
    """Print the methods that are replaced on instances, and prove that the scan finds replacements."""
    chunk, replaced = model.module.module, [sorted(names) for names in replaced_on_instances()]
    rotary = chunk.rotary_pos_emb
    chunk.forward, chunk.rotary_pos_emb = partial(chunk.forward), torch.nn.Identity()
    print(f"SCAN {json.dumps([*replaced, sorted(replaced_on_instances()[1])])}")
    del chunk.forward
    chunk.rotary_pos_emb = rotary


@pytest.mark.ranks
def test_no_method_is_replaced_on_an_instance(corpus: Path) -> None:
    """Neither Megatron's start nor any feature changes single objects, so the table is complete."""
    flags = "--hdp-tokens-per-rank 256 --seq1f1b-slices 2 --chunked-cross-entropy 16 --activation-policy memo --bf16"
    outcome = train(
        1, *MODEL, *TRAIN, *HDP, *flags.split(), "--train-iters", 1, "--swap-fraction", 0.4, "--host-memory-gb", 0.02,
        "--use-distributed-optimizer", "--data-path", corpus,
        entry=partial(train_with, scan_instances),
    )  # fmt: skip
    assert "SCAN" in outcome.text, outcome.text[-1500:]
    kinds, replaced, found = json.loads(re.findall(r"^SCAN (.*)$", outcome.text, re.MULTILINE)[0])
    wanted = {"GPTModel", "PlannedTransformerLayer", "DistributedOptimizer", "ChainedOptimizer", "DocumentAttention"}
    assert wanted <= set(kinds)
    assert replaced == []
    assert found == ["GPTModel.forward", "GPTModel.rotary_pos_emb"]


@pytest.mark.slow
def test_schedules_look_up_no_name_outside_the_table() -> None:
    """Each name in a copied schedule, and each copied schedule, is a row."""
    core = ROOT / "megatron" / "bytescale"
    calls = [
        (path, node)
        for path in core.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("copy_with_names")
    ]
    ((path, call),) = calls
    assert path.name == "seq1f1b.py"
    names = {keyword.arg for keyword in call.keywords}
    assert names == set(SCHEDULE_ROWS) - {
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    }


@pytest.mark.full
@pytest.mark.ranks
def test_the_module_prints_the_table() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "megatron.bytescale"], cwd=ROOT, capture_output=True, text=True, timeout=400,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    on_cpu = not torch.cuda.is_available()
    expected = expected_states(set()) | dict.fromkeys(CPU_ROWS, "replaced" if on_cpu else "untouched")
    assert states(lines) == expected
    rows = [*FEATURES.items(), *SPECIALIZED]
    assert all(f" {features}: " in line for (_, features), line in zip(rows, lines, strict=True))


@pytest.mark.slow
def test_only_the_registry_changes_the_class_of_an_object() -> None:
    """Each subclass in a call of ``specialize`` is in a row of the table."""
    called: set[str] = set()
    for path in (ROOT / "megatron" / "bytescale").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr == "__class__" and isinstance(node.ctx, ast.Store):
                assert path.name == "registry.py", f"{path}: line {node.lineno}"
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "specialize":
                called.add(ast.unparse(node.args[1]))
    table = ast.parse((ROOT / "megatron" / "bytescale" / "patches.py").read_text(encoding="utf-8"))
    keywords = [node for node in ast.walk(table) if isinstance(node, ast.keyword)]
    rows = {ast.unparse(keyword.value) for keyword in keywords if keyword.arg == "subclass"}
    assert called == rows
    assert rows
