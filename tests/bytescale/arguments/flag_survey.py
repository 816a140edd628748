"""Survey of Megatron's flags from its parser, configuration functions and source, for ``test_flags.py``."""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NOT_ON_OUR_PATH = {"training/training.py": ("get_model",)}
"""Functions that ``pretrain`` does not call if it gets a configuration of the model."""


@dataclasses.dataclass(frozen=True)
class Given:
    """Placeholder for the value of an argument, which can be recognized in a configuration."""

    dest: str


@dataclasses.dataclass(frozen=True)
class Survey:
    """Properties of each argument, by its name in the namespace.

    Attributes:
        flags: options that set the argument.
        fields: "Class.field" of each configuration field that gets the value unchanged.
        changes: arguments that functions read by name, and whose value changes a configuration.
        readers: files in Megatron's package that read the argument from the namespace.
        set_by: arguments that a feature sets before Megatron checks them, by the feature's name; "device" for a CPU.
    """

    flags: dict[str, list[str]]
    fields: dict[str, list[str]]
    changes: set[str]
    readers: dict[str, list[str]]
    set_by: dict[str, set[str]]


def survey(rank: int, world: int, command_lines: dict[str, list[str]]) -> Survey:
    """Return the survey of Megatron's flags. Runs in a separate process, because it changes Megatron's classes.

    ``command_lines``: words that enable each feature, by its name.
    """
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(add_help=False, allow_abbrev=False))
    flags: dict[str, list[str]] = {}
    for action in parser._actions:
        flags.setdefault(action.dest, []).extend(action.option_strings)
    set_by: dict[str, set[str]] = {}
    for name, words in command_lines.items():
        set_by["device"], set_by[name] = arguments_set(words)
    args = parser.parse_args([])
    return Survey(flags, reached_fields(args), changing(args), readers_of(set(flags)), set_by)


def arguments_set(words: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the arguments that a CPU changes, and the arguments that the features of a command line change."""
    from megatron.training.arguments import parse_args

    from megatron.bytescale import features
    from megatron.bytescale.arguments import parse

    os.environ["WORLD_SIZE"] = "4"
    sys.argv = ["pretrain_gpt_hdp.py", *words]
    args = parse_args(parse.add_arguments)
    given = dict(vars(args))
    parse.set_device_defaults(args, sys.argv, on_cpu=True)
    on_cpu = dict(vars(args))
    features.check(args)
    after = dict(vars(args))
    assert given.keys() == after.keys()
    return {name for name in given if on_cpu[name] != given[name]}, {
        name for name in given if after[name] != on_cpu[name]
    }


def changing(args: Any) -> set[str]:
    """Return the arguments that functions read by name and whose value changes a configuration of our path.

    Called after ``reached_fields``, which disables the checks of classes.
    """
    gated = {"position_embedding_type": "yarn", "swiglu": True, "group_query_attention": True}
    return changing_from({**vars(args), **DECIDED}) | changing_from({**vars(args), **DECIDED, **gated})


def changing_from(plain: dict[str, Any]) -> set[str]:
    """Return further arguments whose value changes a configuration."""

    def parts(**changed: Any) -> str:
        return repr([vars(part) for part in built_parts(argparse.Namespace(**{**plain, **changed}))])

    expected = parts()
    assert expected == parts()
    found = set()
    functions = (megatron_folder() / "training" / "argument_utils.py").read_text(encoding="utf-8")
    for dest in names_read(functions) & set(plain):
        value = plain[dest]
        with contextlib.suppress(Exception):  # an invalid value shows nothing
            if parts(**{dest: (not value) if isinstance(value, bool) else Given(dest)}) != expected:
                found.add(dest)
    return found


CONDITIONS = ("given", "chosen", "equals", "above")
"""Functions that make a condition on their first argument."""

VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"multi_latent_attention": True},
    {"heterogeneous_layers_config_path": "layers.json"},
)
"""Arguments that select the class of the layers' configuration."""

DECIDED = {
    "params_dtype": None, "padded_vocab_size": 128, "cp_comm_type": ["p2p", "a2a"], "use_megatron_fsdp": False,
    "use_torch_fsdp2": False, "multi_latent_attention": False, "spec": None, "yaml_cfg": None,
    "hybrid_layer_pattern": None, "te_precision_config_file": None, "cuda_graph_impl": "none",
    "position_embedding_type": "rope", "heterogeneous_layers_config_path": None, "rope_type": None,
}  # fmt: skip
"""Arguments with values that Megatron's functions inspect; all other values are ``Given``."""


def reached_fields(args: Any) -> dict[str, list[str]]:
    """Return "Class.field" of each configuration of our path, by the argument that reaches it.

    All arguments with a field of the same name are replaced together, and the checks of classes are disabled.
    """
    from megatron.core.fault_injector import FaultInjectorConfig

    classes = configurations()
    names = {field.name for one in classes for field in dataclasses.fields(one)}
    for one in classes:
        one.__post_init__ = lambda self: None  # type: ignore[attr-defined]
    given = {dest: Given(dest) for dest in names & set(vars(args)) - set(DECIDED)}
    found: dict[str, set[str]] = {}
    for variant in VARIANTS:
        for part in built_parts(argparse.Namespace(**{**vars(args), **given, **DECIDED, **variant})):
            for field in dataclasses.fields(part):
                value = vars(part).get(field.name)
                if isinstance(value, Given):
                    found.setdefault(value.dest, set()).add(f"{type(part).__name__}.{field.name}")
    for field in dataclasses.fields(FaultInjectorConfig):  # the training loop fills it by the names of its fields
        found.setdefault(field.name, set()).add(f"FaultInjectorConfig.{field.name}")
    return {dest: sorted(fields) for dest, fields in found.items()}


def built_parts(args: Any) -> list[Any]:
    """Return each configuration of our training."""
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron.bytescale.training.pretrain_arguments import stock_training

    model = stock_training(args).model
    container = pretrain_cfg_container_from_args(args, model)
    parts = [model, model.transformer, *(getattr(container, field.name) for field in dataclasses.fields(container))]
    return [part for part in parts if dataclasses.is_dataclass(part)]


def configurations() -> list[type]:
    """Return the configuration classes of a training."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
    from megatron.training import config
    from megatron.training.models.gpt import GPTModelConfig

    names = (
        "TrainingConfig ValidationConfig SchedulerConfig DistributedInitConfig RNGConfig LoggerConfig CheckpointConfig "
        "ProfilingConfig TokenizerConfig RerunStateMachineConfig StragglerDetectionConfig"
    ).split()
    layers = [TransformerConfig, MLATransformerConfig, HeterogeneousTransformerConfig]
    own = [getattr(config, name) for name in names]
    return [*layers, GPTModelConfig, OptimizerConfig, DistributedDataParallelConfig, *own]


def megatron_folder() -> Path:
    """Return the folder of the installed Megatron."""
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations))).parent


def readers_of(dests: set[str]) -> dict[str, list[str]]:
    """Return the files of Megatron that read each argument, including the checks in arguments.py."""
    root = megatron_folder()
    found: dict[str, set[str]] = {}
    for file in sorted([*(root / "training").rglob("*.py"), *(root / "core").rglob("*.py")]):
        name = str(file.relative_to(root))
        for dest in names_read(file.read_text(encoding="utf-8"), NOT_ON_OUR_PATH.get(name, ())) & dests:
            found.setdefault(dest, set()).add(name)
    return {dest: sorted(files) for dest, files in found.items()}


def names_read(text: str, without: tuple[str, ...] = ()) -> set[str]:
    """Return the names read as ``args.name`` or ``getattr(args, "name")``, except inside some functions."""
    lines = text.splitlines()
    for node in ast.parse(text).body if without else ():
        if isinstance(node, ast.FunctionDef) and node.name in without:
            assert node.end_lineno is not None
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
    pattern = r"(?:\b|_)args(?:\(\))?\.(\w+)\b(?!\s*=[^=])|getattr\(\s*args,\s*['\"](\w+)['\"]"
    return {one or other for one, other in re.findall(pattern, "\n".join(lines))}


def names_declared(text: str, classes: Sequence[str] = ()) -> set[str]:
    """Return the arguments that a file of this project reads: fields of its classes, and names in its conditions.

    ``classes``: only fields of these classes count.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and (not classes or node.name in classes):
            targets = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not classes:
            first = node.args[0] if node.args else None
            if node.func.id in CONDITIONS and isinstance(first, ast.Constant):
                found.add(str(first.value))
    return found
