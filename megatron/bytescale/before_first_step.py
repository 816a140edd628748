"""Errors of Megatron before the first step, each in one line that names the flag that helps.

Megatron reports a checkpoint that does not fit by assertions, by errors of several types, or by ``sys.exit()`` without
a code. ``ERRORS`` and ``EXITS`` list the reasons that a command line can reach. Other errors keep Megatron's message,
in one line.
"""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from typing import Final

from megatron.bytescale.arguments.bad_input import TRACEBACK, is_ours
from megatron.bytescale.arguments.megatron_errors import Reason, known_line
from megatron.bytescale.launch import TRACKER

_MODEL: Final = "give the flags of the model that wrote it"
_MISSING: Final = r"(?:Missing key in checkpoint state_dict: |^\"(?=\S+ from model not in state dict)|^')"
_STATES: Final = "give the optimizer flags of the run that wrote it, or --no-load-optim to start with new states"
ERRORS: Final = (
    Reason(
        r"class input value (?P<mine>\S+) and checkpoint ?value (?P<saved>\S+) for (?P<name>.+) do not match",
        "the learning rate schedule in the checkpoint {load} has {name} {saved}, these flags {mine}: give "
        "--override-opt-param-scheduler to follow the flags, or --use-checkpoint-opt-param-scheduler to follow the "
        "checkpoint",
    ),
    Reason(
        r"(?P<flag>\w+) value from checkpoint \((?P<saved>.*?)\) is not equal to the input argument value "
        r"\((?P<mine>.*?)\)",
        "the checkpoint {load} was written with --{flag} {saved}, and these flags give {mine}: " + _MODEL,
    ),
    Reason(
        r"Size mismatch between saved torch.Size\((?P<saved>.*?)\) and current: torch.Size\((?P<mine>.*?)\) for "
        r"(?P<name>[\w.]+)",
        "the checkpoint {load} has {name} with the shape {saved}, and these flags give {mine}: " + _MODEL,
    ),
    Reason(
        r"Global shape mismatch for loaded \(torch.Size\((?P<saved>.*?)\)\) and expected \(\((?P<mine>.*?)\)\) tensor "
        r"for key (?P<name>[\w.]+)",
        "the checkpoint {load} has {name} with the shape {saved}, and these flags give [{mine}]: " + _MODEL,
    ),
    Reason(
        r"size mismatch for (?P<name>[\w.]+): copying a param with shape torch.Size\((?P<saved>.*?)\) from checkpoint, "
        r"the shape in current model is torch.Size\((?P<mine>.*?)\)",
        "the checkpoint {load} has {name} with the shape {saved}, and these flags give {mine}: " + _MODEL,
    ),
    Reason(
        rf"{_MISSING}(?P<name>optimizer[\w.]*)",
        "the checkpoint {load} has no {name}: " + _STATES,
    ),
    Reason(
        rf"{_MISSING}(?P<name>\w+\.[\w.]+)",
        "the checkpoint {load} has no {name}: "
        + _MODEL
        + ", such as --host-tables, --ngram-layers, --num-experts and --mtp-num-layers",
    ),
    Reason(
        "Detected load from a distributed checkpoint",
        "the checkpoint {load} is of another format: give --ckpt-format torch_dist",
    ),
    Reason(r"^no 'optimizer'$", "the checkpoint {load} has no states of this optimizer: " + _STATES),
    Reason(
        r"Could not find parameter group|flattened_range is not supported",
        "the checkpoint {load} has the states of another optimizer, or with another sharding "
        "(--use-distributed-optimizer): " + _STATES,
    ),
    Reason(
        r"No such file or directory: '(?P<name>.*)'",
        f"--load {{load}}: {{name}} is missing: write the iteration of a checkpoint there into {TRACKER}",
    ),
    Reason(
        r"Invalid length of moe_layer_pattern: (?P<found>\d+), expected (?P<layers>\d+)",
        "--moe-layer-freq has {found} entries for {layers} layers: give one entry for each layer, or a number",
    ),
    Reason(
        r"CheckpointingConfig.__init__\(\) missing",
        "--load {load}: metadata.json of the checkpoint is incomplete: give --ckpt-step of another checkpoint",
    ),
)
EXITS: Final = (
    Reason(
        "Invalid metadata file",
        f"--load {{load}}: {TRACKER} names no iteration: write the iteration of a checkpoint there into it",
    ),
    Reason(
        "exit-on-missing-checkpoint",
        "--load {load} has no checkpoint, and --exit-on-missing-checkpoint is given: correct --load, or remove the "
        "flag to start anew",
    ),
    Reason(
        "could not load the checkpoint",
        "--load {load}: a file of the checkpoint cannot be read, see the lines above: give --ckpt-step of another "
        "checkpoint",
    ),
    Reason(
        "unable to load iteration",
        "--load {load}: the checkpoint holds no iteration: give --finetune to train from its weights",
    ),
    Reason(
        "Unable to load rng state",
        "--load {load}: the checkpoint holds no random states for these ranks: give --no-load-rng, or --finetune to "
        "train from its weights",
    ),
    Reason("ADLR autoresume is not available", "remove --adlr-autoresume: its module is not installed"),
)
_SOURCE_LINES: Final = 14
"""Lines of Megatron's source before an exit that print its reason."""

_RAISED: Final = (AssertionError, ValueError, KeyError, TypeError, AttributeError, IndexError, NotImplementedError)
"""Types of Megatron's errors about settings and checkpoints."""


def line_of(error: BaseException, load: str | None) -> str | None:
    """Return our line about an error before the first step; None for a failure of the machine or of our own code.

    ``load``: folder of ``--load``.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, SystemExit):
        return None if error.code else _exit_line(frames, load)
    is_loading = any(frame.name == "load_checkpoint" for frame in frames)
    is_checkpoint = is_loading and (isinstance(error, Exception) or type(error).__name__.startswith("Checkpoint"))
    if not isinstance(error, _RAISED) and not is_checkpoint:
        return None
    if isinstance(error, ValueError) and is_ours(frames[-1].filename):
        return _one_line(str(error))
    if is_ours(frames[-1].filename):
        return None  # an assertion of ours is a bug
    text = _one_line(_cause(str(error))) if str(error) else f"this must hold: {frames[-1].line}"
    if isinstance(error, KeyError):
        text = f"no {text}"
    if known := known_line(ERRORS, text, load=load):
        return known
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    subject = f"the checkpoint {load} does not fit these flags" if is_loading else "Megatron refuses these settings"
    return f"{subject}: {text} ({where}; {TRACEBACK} prints the calls)"


def _exit_line(frames: traceback.StackSummary, load: str | None) -> str | None:
    """Return our line about an exit with code 0 while nothing was trained; None if Megatron did its work."""
    last = frames[-1]
    if last.lineno is None or not last.filename.endswith(("checkpointing.py", "arguments.py", "global_vars.py")):
        return None
    before = "".join(linecache.getline(last.filename, last.lineno - back) for back in range(_SOURCE_LINES, 0, -1))
    lines = [(before.rfind(reason.pattern), reason.line) for reason in EXITS if reason.pattern in before]
    if lines:
        return max(lines)[1].format(load=load)
    return f"Megatron ended without training ({Path(last.filename).name}:{last.lineno}); the lines above say why"


def _cause(text: str) -> str:
    """Return the error of the first rank in the text of a ``CheckpointException``, which holds tracebacks."""
    if not text.startswith("CheckpointException"):
        return text
    errors = re.findall(r"^ *([A-Za-z_.]+(?:Error|Exception)): (.*)$", text, re.MULTILINE)
    return errors[0][1] if errors else text.splitlines()[-1]


def _one_line(text: str, most: int = 600) -> str:
    """Return a message in one line of at most ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} ..."
