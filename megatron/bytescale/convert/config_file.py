"""Reads and writes ``config.json`` so that every version of transformers from 4.50 on gives it the same meaning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bytescale_ext.errors import one_line
from bytescale_ext.json_input import finite, json_value, stored_text
from bytescale_ext.new_file import write_text
from megatron.bytescale.convert.families import layout_of, model_flags
from megatron.bytescale.convert.library import library
from megatron.bytescale.convert.rotary import HuggingFaceConfig, of_every_version, rope_of

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ONLY_THIS_FOLDER: Final[dict[str, Any]] = {"local_files_only": True, "trust_remote_code": False}  # for from_pretrained
_WRITTEN_ANEW: Final = (
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "dtype",
    "torch_dtype",
)
_MOST_CHARACTERS: Final = 1 << 20
_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


def raw_config(source: Path) -> HuggingFaceConfig:
    """Return a folder's configuration as stored. Raises ValueError unless it is a JSON object."""
    path = source / "config.json"
    try:
        raw = json_value(text := stored_text(path))
        if len(text) > _MOST_CHARACTERS:  # transformers checks each element of a list, 4 µs each
            raise ValueError(f"{len(text):,} characters; a configuration has at most {_MOST_CHARACTERS:,}")
        if finite(raw) != raw:
            raise ValueError("it has a number that is not finite")
    except (OSError, ValueError) as error:
        raise ValueError(f"--input {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"--input {path}: not a JSON object")
    return raw


def config_in(source: Path) -> HuggingFaceConfig:
    """Return a folder's configuration, completed with defaults. Raises ValueError for a bad configuration."""
    raw, path = raw_config(source), source / "config.json"
    try:
        config = library("transformers").AutoConfig.from_pretrained(source, **ONLY_THIS_FOLDER)
    except Exception as error:  # transformers raises many error types for a bad file
        raise ValueError(f"--input {path}: {one_line(error, 200)}") from None
    return _values(raw, config)


def _values(raw: HuggingFaceConfig, config: PretrainedConfig) -> HuggingFaceConfig:
    """Return the values of a configuration: positions as the file gives them, and defaults of transformers."""
    values = config.to_dict()
    theta = getattr(config, "rope_theta", None) or getattr(config, "default_theta", None)
    parameters = values.get("rope_parameters")
    if theta is None and isinstance(parameters, Mapping):
        theta = parameters.get("rope_theta")
    part = getattr(config, "partial_rotary_factor", None) or (parameters or {}).get("partial_rotary_factor")
    positions = {**raw, "partial_rotary_factor": part} if part is not None else raw
    renamed = {name: getattr(config, name) for name in config.attribute_map}
    return {
        **values,
        **renamed,
        "model_type": raw.get("model_type"),
        "rope_parameters": rope_of(positions, theta or 10000.0, config.max_position_embeddings),
        "dtype": str(getattr(config, "dtype", None) or config.torch_dtype).removeprefix("torch."),
    }


def completed(derived: HuggingFaceConfig, source: Path) -> HuggingFaceConfig:
    """Return the configuration of a trained model with the settings of the model that it started from.

    A value that the training has changed is the new value. If the source is another model, only its special tokens
    are taken.

    Args:
        derived: configuration from Megatron's arguments.
        source: folder of the source's ``config.json``.
    """
    raw = json_value(stored_text(source / "config.json"))
    before = config_in(source)
    rows = {"vocab_size": before["vocab_size"]} if before["vocab_size"] <= derived["vocab_size"] else {}
    changed = {name: value for name, value in derived.items() if before.get(name) != value and name not in _TOKENS}
    config = {name: value for name, value in raw.items() if name not in _WRITTEN_ANEW} | changed
    config |= {**rows, "model_type": before["model_type"]}
    config |= {name: derived[name] for name in ("rope_parameters", "dtype")}
    if _flags(config) == _flags(derived):
        return config
    return {**derived, **rows, **{name: raw[name] for name in _TOKENS if name in raw}}


def _flags(config: HuggingFaceConfig) -> tuple[object, ...] | None:
    """Return what decides a model's computation: its flags and names of tensors. None: it cannot be converted."""
    try:
        values = _values({**config, **of_every_version(config["rope_parameters"])}, transformers_config(config))
        return model_flags(values), layout_of(values)
    except ValueError:
        return None


def transformers_config(config: HuggingFaceConfig) -> PretrainedConfig:
    """Return transformers' configuration object for these values."""
    transformers = library("transformers")
    values = {name: value for name, value in config.items() if name != "model_type"}
    values |= of_every_version(config["rope_parameters"])
    made = transformers.CONFIG_MAPPING[config["model_type"]](**values)
    made.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(made)].__name__]
    return made


def write_config(config: HuggingFaceConfig, folder: Path) -> None:
    """Write ``config.json``, with the keys of old and new versions of transformers."""
    made = transformers_config(config)
    made.save_pretrained(folder)
    path = folder / "config.json"
    written = json_value(stored_text(path))
    own = {name: value for name, value in config.items() if name not in _WRITTEN_ANEW}
    dtypes = {"dtype": config["dtype"], "torch_dtype": config["dtype"]}
    renamed = {old: written[new] for old, new in made.attribute_map.items() if new in written}
    values = {**written, **renamed, **own, **of_every_version(config["rope_parameters"]), **dtypes}
    write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")
