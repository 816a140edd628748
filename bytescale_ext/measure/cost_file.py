"""Cost files: measured or published costs of one model on one device (``ModelCost``), stored as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Final

from bytescale_ext.json_input import json_settings, stored_text
from bytescale_ext.new_file import write_text
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import SHAPE_NOT_IN_FILES, ModelCost
from bytescale_ext.plan.cost.model_shape import LatentShape, ModelShape

FLAGS: Final = ("shape.gated", "shape.latent.has_norms", "shape.latent.is_plain")
"""Boolean entries of a cost file."""

MOST: Final = 1 << 40
"""Upper bound of sizes."""

LARGEST: Final = 1e15
"""Upper bound of costs, so that their products are finite."""

SHIPPED: Final = Path(__file__).parent / "costs"
"""Folder of the cost files that are part of the package."""


def read_cost(path: Path | str) -> ModelCost:
    """Read a cost file.

    Raises:
        ValueError: the file cannot be read, or an entry is missing, unknown, negative or of the wrong type.
    """
    try:
        value = json_settings(stored_text(path))
    except OSError as error:
        raise ValueError(f"cost file {path}: {error.strerror}; `bytescale profile` writes one") from None
    except ValueError as error:  # bad JSON, or not UTF-8
        raise ValueError(f"cost file {path} is not JSON ({error}); `bytescale profile` writes one") from None
    try:
        entries = _checked_entries(value, ModelCost, "the file")
        for name in ("forward", "backward"):
            _checked_entries(entries[name], CostModel, name)
        shape = _checked_entries(entries["shape"], ModelShape, "shape")
        latent = shape.get("latent")
        latent_entries = {} if latent is None else _checked_entries(latent, LatentShape, "shape.latent")
        _check_types(entries, shape, latent_entries)
        return ModelCost.from_json(entries)
    except ValueError as error:
        raise ValueError(f"cost file {path}: {error}") from None


def write_cost(path: Path | str, cost: ModelCost) -> None:
    """Write a cost file for ``read_cost``. Raises OSError if the file cannot be written."""
    write_text(path, json.dumps(cost.to_json(), indent=2) + "\n")


def shipped(name: str) -> ModelCost:
    """Read a shipped cost file by name. Raises ValueError, which lists the names, for an unknown name."""
    names = sorted(path.stem for path in SHIPPED.glob("*.json"))
    if name not in names:
        raise ValueError(f"no cost file {name} is shipped; choose one of {', '.join(names)}")
    return read_cost(SHIPPED / f"{name}.json")


def check_same_model(
    cost: ModelCost, shape: ModelShape, tensor_parallel: int, dtype: str, path: Path | str
) -> ModelCost:
    """Check that costs belong to a model, and return the costs with the model's shape.

    The number of layers and the attention windows may differ, because costs are per layer with full attention. The
    vocabulary may differ too, because Megatron pads it: costs of the output head are scaled to the vocabulary of
    ``shape``. All other sizes, and the fraction of layers with experts, must be equal.

    Args:
        cost: content of the cost file.
        shape: shape of the model.
        tensor_parallel: number of tensor-parallel ranks of the run.
        dtype: parameter type of the run, for example "bfloat16".
        path: path of the cost file, for the error message.

    Raises:
        ValueError: sizes differ; the message names them.
    """
    free = {"num_layers", "num_expert_layers", "vocab", *SHAPE_NOT_IN_FILES}
    model = {field.name: getattr(shape, field.name) for field in fields(ModelShape) if field.name not in free}
    model |= {"tensor_parallel": tensor_parallel, "dtype": dtype}
    file = {name: getattr(cost.shape if hasattr(cost.shape, name) else cost, name) for name in model}
    for sizes, owner in ((model, shape), (file, cost.shape)):
        sizes["share of layers with experts"] = Fraction(owner.num_expert_layers, owner.num_layers)
    differing = [f"{name} is {file[name]} there and {model[name]} here" for name in model if model[name] != file[name]]
    if differing:
        raise ValueError(
            f"cost file {path} is for another model: {', '.join(differing)}; run `bytescale profile` with this model's "
            f"flags"
        )
    ratio = shape.vocab / cost.shape.vocab
    return replace(cost, shape=shape, head_forward=ratio * cost.head_forward, head_backward=ratio * cost.head_backward)


def _checked_entries(value: object, kind: type, where: str) -> dict[str, object]:
    """Return ``value``. Raises ValueError unless it is a mapping whose keys are the fields of ``kind``."""
    if not isinstance(value, dict):
        raise ValueError(f"{where} holds a {type(value).__name__} where entries are expected")
    known = {field.name: field.default is MISSING for field in fields(kind)}
    for name in value:
        if name not in known:
            raise ValueError(f"{where} has an unknown entry {name}; known are {', '.join(known)}")
    for name, is_needed in known.items():
        if is_needed and name not in value:
            raise ValueError(f"{where} has no entry {name}")
    return value


def _numbers(entries: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (name, value) of all entries except sizes and flags of the shape, which have other checks."""
    for name, value in entries.items():
        if isinstance(value, dict) and name != "shape":
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield from ((f"{prefix}{name}", item) for item in value)
        elif name != "shape":
            yield f"{prefix}{name}", value


def _check_types(entries: dict[str, object], shape: dict[str, object], latent: dict[str, object]) -> None:
    """Raise ValueError for a size that is not a large enough integer, a flag that is not Boolean, or text that is not.

    ``latent``: entries of ``shape.latent``; empty without latent attention.
    """
    sizes = {f"shape.{name}": size for name, size in shape.items() if name != "latent"}
    sizes |= {f"shape.latent.{name}": size for name, size in latent.items()}
    flags = {name: sizes.pop(name) for name in FLAGS if name in sizes}
    sizes["tensor_parallel"] = entries["tensor_parallel"]
    optional = {f"shape.{field.name}" for field in fields(ModelShape) if field.default is not MISSING}
    optional.add("shape.latent.query_rank")
    for name, size in sizes.items():
        least = 0 if name in optional else 1
        if isinstance(size, int) and size > MOST:
            raise ValueError(f"{name} is {size}; it must be at most 2^40")
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name} is {json.dumps(size)}; it must be a whole number, at least {least}")
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ValueError(f"{name} is {json.dumps(flag)}; it must be true or false")
    for name, number in _numbers(entries):
        if isinstance(number, bool) or (isinstance(number, int | float) and not 0 <= number <= LARGEST):
            raise ValueError(f"{name} is {json.dumps(number)}; it must be a number from 0 to {LARGEST:g}")
    for name in ("device", "dtype", "source"):
        if not isinstance(entries[name], str):
            raise ValueError(f"{name} is {json.dumps(entries[name])}; it must be text")
