"""``bytescale convert``: convert a Hugging Face model to a Megatron checkpoint, and back."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import shlex
from pathlib import Path

from bytescale_ext.errors import one_line
from megatron.bytescale.checkpoints import sharded_at, trust_checkpoints
from megatron.bytescale.cli.shared.options import add_json, add_trust_checkpoint
from megatron.bytescale.convert.config_file import raw_config
from megatron.bytescale.convert.families import FAMILIES, family_of
from megatron.bytescale.inference.new_folder import check_new

NAME = "convert"
HELP = f"convert a Hugging Face model ({', '.join(FAMILIES)}) to a Megatron checkpoint, and back"
EXAMPLE = "bytescale convert --from hf --input Llama-3.1-8B --output checkpoints/llama"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale convert``."""
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument("--from", dest="source", choices=("hf",), help="read a Hugging Face model (--input)")
    direction.add_argument("--to", dest="target", choices=("hf",), help="write a Hugging Face model (from --load)")
    parser.add_argument(
        "--input", type=Path, metavar="DIR", help="with --from: a folder of config.json and safetensors"
    )
    parser.add_argument("--load", type=Path, metavar="DIR", help="with --to: a folder of Megatron checkpoints")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="write this new folder")
    parser.add_argument(
        "--dtype", choices=("bf16", "fp32"), help="with --from: type of the parameters (default: as stored)"
    )
    add_trust_checkpoint(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Convert the model and print the next command. Raises ValueError for a model that cannot be converted."""
    wanted, other = ("--input", "--load") if args.source else ("--load", "--input")
    folders = {"--input": args.input, "--load": args.load}
    if folders[wanted] is None or folders[other] is not None:
        raise ValueError(f"{'--from' if args.source else '--to'} hf needs {wanted}, and no {other}")
    if args.target and args.dtype:
        raise ValueError("--dtype needs --from: a Hugging Face model has the type of the checkpoint")
    logging.disable(logging.WARNING)  # Megatron's warnings about unused packages
    if args.target:  # before the slow imports
        sharded_at("--load", args.load)
    else:
        family_of(raw_config(args.input))
    check_new(args.output)
    from megatron.bytescale import cpu

    trust_checkpoints(args.trust_checkpoint)
    cpu.install_if_wanted(["--cpu"])  # before Megatron is imported
    from megatron.bytescale.convert.folders import from_hugging_face, to_folder

    with contextlib.redirect_stdout(io.StringIO()):
        if args.source:
            converted = from_hugging_face(args.input, args.output, args.dtype)
            own: dict[str, object] = {"training_flags": converted.flags}
            flags = ["--load", str(args.output), "--ckpt-format", "torch_dist", *converted.flags]
            text = f"train with {shlex.join(flags)}"
        else:
            converted = to_folder(args.load, args.output)
            own = {"model_type": converted.kind}
            text = f"load with transformers.AutoModelForCausalLM.from_pretrained({str(args.output)!r})"
    if args.json:
        about = {"output": str(args.output), "parameters": converted.parameters}
        print(json.dumps({**about, **own, "notes": converted.notes}))
    else:
        print("\n".join([f"{one_line(args.output)}: {converted.parameters:,} parameters", *converted.notes, text]))
    return 0
