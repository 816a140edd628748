"""Converts checkpoint folders from Hugging Face to Megatron and back.

One CPU process holds all parameters. Megatron's checkpoint is sharded (torch_dist), so it loads with any tensor,
pipeline and expert parallelism, with or without this package.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bytescale_ext.convert.tensors import to_hugging_face, to_megatron
from bytescale_ext.errors import one_line
from bytescale_ext.new_file import write_text
from megatron.bytescale.arguments import parse
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.checkpoints import elements_in
from megatron.bytescale.convert.arguments import TrainedModel, configuration
from megatron.bytescale.convert.config_file import ONLY_THIS_FOLDER, completed, config_in, write_config
from megatron.bytescale.convert.families import layout_of, model_flags
from megatron.bytescale.convert.library import library
from megatron.bytescale.convert.source import FOLDER, add_source, copy_source, source_of
from megatron.bytescale.convert.weights import FolderWeights
from megatron.bytescale.inference.load import (
    Heads,
    build_model,
    check_gate,
    checkpoint_arguments,
    checkpoint_at,
    read_weights,
)
from megatron.bytescale.inference.new_folder import new_folder
from megatron.bytescale.launch import TRACKER

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

    from megatron.bytescale.convert.rotary import HuggingFaceConfig

RELEASE = "release"  # Megatron's name for a checkpoint without an iteration, to start a training from
SHARD = "5GB"
VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")  # tensors with a row for each token
EXTRAS = ("draft_heads", "ngram_layers")  # parts that Hugging Face models cannot have


@dataclass(frozen=True)
class TokenizerFolder:
    """The tokenizer of a training and its first checkpoint, under the names of Megatron's arguments."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    load: str | None = None

    def folder(self) -> Path | None:
        """Return the folder of the tokenizer if it is a Hugging Face folder, else None."""
        model = self.tokenizer_model
        is_folder = self.tokenizer_type == "HuggingFaceTokenizer" and model and Path(model).is_dir()
        return Path(str(model)) if is_folder else None

    def load_folder(self) -> Path | None:
        """Return the folder of checkpoints from which the training started, or None."""
        return Path(self.load) if self.load else None


@dataclass(frozen=True)
class Converted:
    """A model that was written in the other format.

    Attributes:
        parameters: number of parameters.
        notes: parts of the given model that were not used, one line for each kind.
        flags: of a Megatron checkpoint: flags of a training that begins from it.
        kind: of a Hugging Face model: its ``model_type``.
    """

    parameters: int
    notes: list[str]
    flags: list[str] = field(default_factory=list)
    kind: str = ""


def from_hugging_face(source: Path, output: Path, dtype: str | None) -> Converted:
    """Convert a Hugging Face model to a Megatron checkpoint.

    Args:
        source: folder with ``config.json`` and safetensors.
        output: new folder of checkpoints for ``--load``.
        dtype: "bf16" or "fp32"; None: the dtype of the stored model.

    Raises:
        ValueError: the model cannot be converted, tensors are missing or have wrong shapes, ``output`` exists, or a
        package is not installed.
    """
    with new_folder(output) as part, ExitStack() as opened:
        config = config_in(source)
        weights = FolderWeights(source, opened)
        weights.check_sizes(config)
        words = [
            *_model_flags(config, source),
            *_tokenizer_flags(source),
            "--padded-vocab-size",
            str(config["vocab_size"]),
        ]
        words += _dtype_flags(dtype or config["dtype"])
        args = _settled(words)
        model = build_model(args, None, on_cpu=True, stored=weights.num_bytes)
        tensors = to_megatron(layout_of(config), weights.read)
        _fill(model, tensors, args.params_dtype)
        _save(model, args, part)
        copy_source(source, part / FOLDER)
    count = sum(parameter.numel() for parameter in model.parameters())
    return Converted(count, weights.notes(), flags=words)


def to_folder(load: Path, output: Path) -> Converted:
    """Convert the last Megatron checkpoint in a folder to a Hugging Face model, without layers of later tokens.

    Args:
        load: folder of checkpoints (``--save`` of a training).
        output: new folder for ``config.json``, safetensors of up to 5 GB and, if known, the tokenizer.

    Raises:
        ValueError: no checkpoint is readable, its model belongs to no family, or ``output`` exists.
    """
    with new_folder(output) as part:
        checkpoint = checkpoint_at("--load", load)
        args = checkpoint_arguments(checkpoint)
        for name in EXTRAS:
            if getattr(args, name, None):
                raise ValueError(f"--load {load}: a model with {name} cannot be converted")
        check_gate(load, checkpoint, args)
        tokenizer = options_of(args, TokenizerFolder)
        source = source_of([load, tokenizer.load_folder(), tokenizer.folder()])
        derived = configuration(options_of(args, TrainedModel))
        config: HuggingFaceConfig = derived if source is None else completed(derived, source)
        later = getattr(args, "mtp_num_layers", None)  # ``build_model`` removes these layers from the arguments
        model = build_model(args, None, on_cpu=True, stored=elements_in(checkpoint))
        read_weights(model, checkpoint, Heads(checkpoint, None, {}))
        tensors = to_hugging_face(layout_of(derived), without_padding(model.state_dict(), config["vocab_size"]))
        _write_shards(tensors, part)
        _copy_tokenizer(tokenizer, part)
        if source is not None:
            add_source(source, part)
        write_config(config, part)
    notes = [f"left out, because the model does not have it: multi-token prediction, {later} layer(s)"] if later else []
    return Converted(sum(tensor.numel() for tensor in tensors.values()), notes, kind=str(config["model_type"]))


def without_padding(state: Mapping[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Return the tensors [...] of a model, of which those with a row for each token have ``rows`` rows."""
    return {name: tensor[:rows] if name in VOCABULARY else tensor for name, tensor in state.items()}


def _model_flags(config: HuggingFaceConfig, source: Path) -> list[str]:
    """Return Megatron's flags for a folder's configuration. Raises ValueError for missing values and other types."""
    try:
        return model_flags(config)
    except (ArithmeticError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"--input {source / 'config.json'}: {one_line(repr(error), 200)}") from None


def _dtype_flags(dtype: str) -> list[str]:
    """Return the flag for a dtype. Raises ValueError for a dtype that Megatron's checkpoint would not keep."""
    if dtype in ("bf16", "bfloat16"):
        return ["--bf16"]
    if dtype in ("fp32", "float32", "None"):
        return []
    raise ValueError(f"the model is stored in {dtype}: choose --dtype bf16 or --dtype fp32")


def _tokenizer_flags(source: Path) -> list[str]:
    """Return the flags of the folder's tokenizer, or of a null tokenizer if there is none."""
    if any((source / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(source)]
    return []


def _settled(words: list[str]) -> argparse.Namespace:
    """Parse a model's flags into Megatron's checked arguments."""
    from megatron.training.arguments import parse_args, validate_args

    length = words[words.index("--max-position-embeddings") + 1]
    needed = ["--seq-length", length, "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-5"]
    with parse.refusals_of_megatron(), parse.command_line(["bytescale convert", *words, *needed]):
        args = parse_args(parse.add_arguments)
        parse.set_device_defaults(args, words, on_cpu=True)
        validate_args(args)
    args.perform_initialization = False
    return args


def _fill(model: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype) -> None:
    """Copy tensors into a model by name: parameters in ``dtype``, each exactly once, and biases of experts in float32.

    Raises ValueError for a wrong shape.
    """
    wanted = dict(model.named_parameters())
    buffers = dict(model.named_buffers())
    for name, tensor in tensors:
        target = wanted.pop(name) if name in wanted else buffers[name]
        if target.shape != tensor.shape:
            shapes = f"{list(tensor.shape)}, not {list(target.shape)}"
            raise ValueError(f"--input: {name} has the shape {shapes}, as config.json says")
        target.data = tensor.to(torch.float32 if name in buffers else dtype)
    assert not wanted, f"{wanted.keys()}"


def _save(model: MegatronModule, args: argparse.Namespace, output: Path) -> None:
    """Write Megatron's checkpoint, and last the file that names it."""
    from megatron.core import dist_checkpointing
    from megatron.training.checkpointing import _build_sharded_state_dict_metadata

    metadata = _build_sharded_state_dict_metadata(args)
    state = {"args": args, "checkpoint_version": 3.0, "iteration": 0}
    state["model"] = model.sharded_state_dict(metadata=metadata)
    folder = output / RELEASE
    folder.mkdir()
    kept = {name: value for name, value in metadata.items() if name != "dp_cp_group"}
    dist_checkpointing.save(state, str(folder), content_metadata=kept)
    write_text(output / TRACKER, RELEASE)


def _write_shards(tensors: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write tensors of any shape as safetensors of up to 5 GB, plus an index if there are several files."""
    plan = library("huggingface_hub").split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD)
    for name, inside in plan.filename_to_tensors.items():
        parts = {key: tensors[key].clone(memory_format=torch.contiguous_format) for key in inside}
        library("safetensors.torch").save_file(parts, folder / name, metadata={"format": "pt"})
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def _copy_tokenizer(tokenizer: TokenizerFolder, output: Path) -> None:
    """Copy the tokenizer to the model's folder if it is a Hugging Face folder."""
    if (model := tokenizer.folder()) is not None:
        library("transformers").AutoTokenizer.from_pretrained(model, **ONLY_THIS_FOLDER).save_pretrained(output)
