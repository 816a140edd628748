"""``bytescale draft``: export the draft heads of a checkpoint to a separate folder."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from dataclasses import asdict
from pathlib import Path

from bytescale_ext.errors import one_line
from megatron.bytescale.checkpoints import sharded_at, trust_checkpoints
from megatron.bytescale.cli.shared.options import add_json, add_trust_checkpoint
from megatron.bytescale.inference.new_folder import check_new

NAME = "draft"
HELP = "export the draft heads of a checkpoint to a separate folder (bytescale draft export)"
EXAMPLE = "bytescale draft export --load runs/heads --to safetensors --output runs/clover"
EXPORT_HELP = "write the draft heads of a checkpoint as safetensors with a configuration file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale draft export``."""
    subparsers = parser.add_subparsers(dest="draft_command", required=True, metavar="COMMAND")
    export = subparsers.add_parser("export", help=EXPORT_HELP, description=EXPORT_HELP, epilog=f"example: {EXAMPLE}")
    export.add_argument(
        "--load", type=Path, required=True, metavar="DIR", help="folder of checkpoints with draft heads"
    )
    export.add_argument("--to", choices=("safetensors",), default="safetensors", help="format (%(default)s)")
    export.add_argument("--output", type=Path, required=True, metavar="DIR", help="write this new folder")
    add_trust_checkpoint(export)
    add_json(export)
    export.set_defaults(prog=export.prog)


def run(args: argparse.Namespace) -> int:
    """Write the folder and print its content."""
    logging.disable(logging.WARNING)  # Megatron's warnings about unused packages
    sharded_at("--load", args.load)  # before the slow imports
    check_new(args.output)
    from megatron.bytescale import cpu

    trust_checkpoints(args.trust_checkpoint)
    cpu.install_if_wanted(["--cpu"])  # before Megatron is imported
    from megatron.bytescale.inference.export import export_heads

    settings, num_parameters = export_heads(args.load, args.output)
    if args.json:
        print(json.dumps({"output": str(args.output), "parameters": num_parameters, **asdict(settings)}))
        return 0
    print(f"{one_line(args.output)}: {settings.num_heads} {settings.kind} heads, {num_parameters:,} parameters")
    print(f"decode with them: bytescale generate --load MODEL --draft {shlex.quote(str(args.output))} --prompt TEXT")
    return 0
