"""``bytescale logprobs``: write the log-probability of each token of a data set under a model."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

from bytescale_ext.data.corpus.sidecar import HEADER, LOGPROBS, check_sidecar, open_sidecar
from bytescale_ext.data.samples.lengths import check_indexed_dataset
from bytescale_ext.errors import one_line
from bytescale_ext.json_input import stored_text
from megatron.bytescale.cli.shared.inputs import check_apart, count
from megatron.bytescale.cli.shared.options import add_json
from megatron.bytescale.launch import TRACKER

NAME = "logprobs"
HELP = "write the log-probability of each token of a data set under a model, with the plans of a training"
EXAMPLE = (
    "bytescale logprobs --load runs/base --data data/pairs --output data/pairs.base -- $TRAINING_FLAGS; "
    "on 8 ranks: torchrun --nproc-per-node 8 --no-python bytescale logprobs ..."
)
NEEDED = "--hybrid-data-parallel"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``bytescale logprobs``."""
    parser.add_argument("--load", type=Path, required=True, metavar="DIR", help="folder of checkpoints of the model")
    parser.add_argument("--data", required=True, metavar="PREFIX", help="data set, PREFIX.bin and PREFIX.idx")
    parser.add_argument(
        "--output",
        required=True,
        metavar="PATH",
        help="write PATH.bin, one float32 number for each token, and PATH.json; a killed run goes on",
    )
    parser.add_argument(
        "--documents",
        type=count,
        default=256,
        metavar="N",
        help="documents of a step, after which their numbers are written (%(default)s)",
    )
    add_json(parser)
    parser.add_argument(
        "flags", nargs="*", metavar="-- FLAGS", help=f"flags of the training command, with {NEEDED}, after a --"
    )


def run(args: argparse.Namespace) -> int:
    """Write the sidecar and print its figures on the first process.

    Raises:
        ValueError: the data set, the checkpoint or a flag cannot be used.
    """
    if NEEDED not in args.flags:
        raise ValueError(f"give the flags of the training after --, with {NEEDED}")
    info = check_indexed_dataset(args.data)
    check_apart(args.output, [args.data])
    num_documents = info.num_documents - info.num_empty
    world = int(os.environ.get("WORLD_SIZE", "1"))
    size = min(args.documents, num_documents)
    size += -size % world
    is_first = os.environ.get("RANK", "0") == "0"
    with contextlib.redirect_stdout(sys.stderr):
        _record(args, num_documents, size)
    if is_first:
        print(_summary(args))
    return 0


def _record(args: argparse.Namespace, num_documents: int, size: int) -> None:
    """Run the evaluation; ``size``: documents of a step."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(args.flags)  # before Megatron is imported
    from megatron.bytescale.train import main
    from megatron.bytescale.training.logprobs import DocumentsInOrder, Progress, Recorder, Task, record

    task = Task(args.data, args.output, model_of(args.load), size)
    recorder = Recorder(task, DocumentsInOrder(args.data), Progress.of(task))
    if os.environ.get("RANK", "0") == "0":
        recorder.begin()
    steps = -(-(num_documents - recorder.done.num_documents) // size)
    words = [word for word in args.flags if word != "--sft"]  # the prompts of chats have probabilities too
    words += ["--data-path", args.data, "--split", "0,100,0", "--load", str(args.load)]
    words += ["--finetune", "--no-load-optim", "--no-load-rng", "--skip-train", "--eval-interval", "1"]
    words += ["--global-batch-size", str(size), "--eval-global-batch-size", str(size), "--eval-iters", str(steps)]
    if steps > 0:
        sys.argv = ["bytescale logprobs", *words]
        main(lambda training, runtime: record(recorder, training, runtime))
        recorder.end()


def model_of(load: Path) -> str:
    """Return a name of the newest checkpoint of a folder. Raises ValueError if the folder has none."""
    try:
        return f"{load.resolve()} {stored_text(load / TRACKER).strip()}"
    except (OSError, UnicodeDecodeError):
        raise ValueError(f"--load {load}: no checkpoint of Megatron") from None


def _summary(args: argparse.Namespace) -> str:
    """Return the figures of a complete sidecar."""
    header = check_sidecar(args.output, args.data, LOGPROBS)
    mean = float(open_sidecar(args.output).sum(dtype="float64")) / max(1, header.num_nonzero)
    figures = {"num_tokens": header.num_values, "num_predicted": header.num_nonzero, "mean_logprob": mean}
    if args.json:
        return json.dumps({"output": args.output, **figures}, indent=2)
    return (
        f"{one_line(args.output)}.bin, {one_line(Path(args.output + HEADER).name)}\n"
        f"tokens     {header.num_values:,}, {header.num_nonzero:,} of them predicted\nmean       {mean:.4f} per token"
    )
