"""Our flags in Megatron's parser, defaults that depend on the device, and Megatron's own checks."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import importlib.util
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bytescale_ext.data.samples.texts import refuse_code_of_folders
from megatron.bytescale import features
from megatron.bytescale.arguments.bad_input import TRACEBACK, Reasons, refusals_of_megatron
from megatron.bytescale.arguments.renamed import refuse_words
from megatron.bytescale.arguments.values import check_values
from megatron.bytescale.arguments.vocabulary import pad_vocabulary
from megatron.bytescale.checkpoints import trust_checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags of all features to Megatron's parser (``extra_args_provider``)."""
    parser.usage = "%(prog)s FLAGS (--help lists them)"  # instead of a thousand lines before each error
    group = parser.add_argument_group("bytescale: device and costs")
    group.add_argument("--cpu", action="store_true", help="Train on CPU with gloo. The default without a GPU.")
    group.add_argument(
        "--cost-file",
        type=Path,
        metavar="FILE",
        help="Plan with the costs that `bytescale profile` measured for this model on this hardware. Default: the "
        "shipped costs of an H100, scaled to the model; activation policies measure one layer when training starts.",
    )
    group.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="Load checkpoints with pickled classes that Megatron's checkpoints do not need. They can run code.",
    )
    for feature in features.FEATURES:
        feature.add_arguments(parser)
    accept_fractions(parser)
    escape_percent_signs(parser)
    _print_ours_first(parser)
    return parser


def _print_ours_first(parser: argparse.ArgumentParser) -> None:
    """Let ``--help`` print the groups of this package before Megatron's, which fill 3,000 lines."""
    parser.description = "The flags of this package, then Megatron's."
    parser._action_groups.sort(key=lambda group: not (group.title or "").startswith("bytescale: "))


FRACTIONS = ("rotary_base", "rotary_seq_len_interpolation_factor")
"""Arguments that Megatron computes with as fractions, but whose flags take whole numbers alone."""


def accept_fractions(parser: argparse.ArgumentParser) -> None:
    """Let the flags of ``FRACTIONS`` take fractions."""
    for action in parser._actions:
        if action.dest in FRACTIONS:
            action.type = _number


def without_fractions(argv: Sequence[str]) -> list[str]:
    """Return a command line without the flags of ``FRACTIONS`` and ``TRACEBACK``.

    Megatron parses the command line once more for its fault tolerance, with its own types.
    """
    flags = {f"--{name.replace('_', '-')}" for name in FRACTIONS}
    argv = [word for word in argv if word != TRACEBACK]
    after = [False, *(word in flags for word in argv)]
    pairs = zip(argv, after, strict=False)
    return [word for word, is_value in pairs if not is_value and word.split("=")[0] not in flags]


def _number(text: str) -> float:
    """Return a number, whole if it is written without a point."""
    return int(text) if text.lstrip("+-").isdigit() else float(text)


def escape_percent_signs(parser: argparse.ArgumentParser) -> None:
    """Double the bare percent signs in help texts. Megatron 0.19.2 has one, which breaks ``--help``."""
    for action in parser._actions:
        if action.help:
            action.help = re.sub(r"%%|%(?!\(\w+\))", "%%", action.help)


NEVER = 1 << 40
"""Steps between evaluations if there are none; Megatron divides by this number."""

ENGINE = "transformer_engine"

# Settings that Megatron turns on by default, and the modules that they need.
NEEDS = {
    "apply_rope_fusion": ENGINE,
    "gradient_accumulation_fusion": "fused_weight_gradient_mlp_cuda",  # from Apex; the output layer has no fallback
    "masked_softmax_fusion": "scaled_masked_softmax_cuda",  # from Apex
}


def is_installed(module: str) -> bool:
    """Return whether a module is installed on this machine."""
    return importlib.util.find_spec(module) is not None


NAMED_BY = {"deep_ep": "flex"}
"""Module -> the word of a command line that asks for it, if it is not the module's name."""


def named_or_installed(argv: Sequence[str]) -> Callable[[str], bool]:
    """Return a check for modules on a command line's machine: installed here, or named on the command line."""
    return lambda module: NAMED_BY.get(module, module) in argv or is_installed(module)


def set_device_defaults(
    args: argparse.Namespace, argv: Sequence[str], on_cpu: bool, has: Callable[[str], bool] = is_installed
) -> None:
    """Turn off settings that the training's machine cannot run, so that command lines need not do so.

    Without TransformerEngine use Megatron's own layers; without Apex use no fused kernels. On CPU use gloo in place of
    NCCL, and initialize weights on the CPU. Raises ValueError if TransformerEngine or DeepEP is requested by name but
    not installed.

    ``has``: returns whether the training's machine has a module; by default this machine is checked.
    """

    def can_use(module: str) -> bool:
        return not on_cpu and has(module)

    if on_cpu:
        args.distributed_backend = "gloo"
        args.use_cpu_initialization = True
        args.bias_gelu_fusion = args.bias_swiglu_fusion = args.bias_dropout_fusion = False
    if args.num_experts and not (args.swiglu or args.quick_geglu):
        args.bias_gelu_fusion = False  # Megatron's experts refuse a fused GELU in the first step
    if args.transformer_impl == ENGINE and not can_use(ENGINE):
        if "--transformer-impl" in argv:
            reason = "there is no GPU" if on_cpu else "TransformerEngine is not installed (pip install .[gpu])"
            raise ValueError(f"--transformer-impl transformer_engine: {reason}; use --transformer-impl local")
        args.transformer_impl = "local"
    if args.moe_token_dispatcher_type == "flex" and not on_cpu and not has("deep_ep"):
        raise ValueError("--moe-token-dispatcher-type flex: DeepEP (deep_ep) is not installed; use alltoall")
    vars(args).update({name: getattr(args, name) and can_use(module) for name, module in NEEDS.items()})
    if not can_use("apex"):  # without Apex, Megatron's own norm refuses it
        args.no_persist_layer_norm = True
    if args.tensor_model_parallel_size > 1:  # Megatron requires it on GPUs before Blackwell
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


@contextlib.contextmanager
def _refusals_of_parser() -> Iterator[None]:
    """Convert an exit of the parser about a flag to a ValueError, which only one process of a machine prints."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stderr(text):
            yield
    except SystemExit as end:
        if end.code != 2:
            raise
        reason = text.getvalue().partition(": error: ")[2].strip()
        raise ValueError(reason + _suggestion(reason)) from None
    print(text.getvalue(), end="", file=sys.stderr)


def _suggestion(reason: str) -> str:
    """Return the flag that an unknown flag may mean, as a question in brackets; "" without a similar flag."""
    unknown = re.match("unrecognized arguments: ([^ =]+)", reason)
    flags = [flag for action in whole_parser()._actions for flag in action.option_strings] if unknown else []
    near = difflib.get_close_matches(unknown[1], flags, 1) if unknown else []
    return f" (did you mean {near[0]}?)" if near else ""


def parse(
    argv: Sequence[str],
    on_cpu: bool,
    settle: Callable[[argparse.Namespace], None] | None = None,
    has: Callable[[str], bool] = is_installed,
) -> argparse.Namespace:
    """Parse with Megatron's parser, check all arguments, and set Megatron's globals. Call it once per process.

    ``settle`` changes the parsed arguments before they are checked; the profile of a training command needs this. For
    ``has`` see ``set_device_defaults``.

    Raises ValueError, before anything is built, for settings that cannot run. After the call the tokenizer, timers and
    writers exist.
    """
    from megatron.training.arguments import parse_args
    from megatron.training.global_vars import set_global_variables

    refuse_words(argv)
    words = [word for word in argv if word != TRACEBACK]
    with refusals_of_megatron(), _refusals_of_parser(), command_line(words):
        args = parse_args(add_arguments)
    if settle is not None:
        settle(args)
    check(args, argv, on_cpu, has)
    refuse_code_of_folders()
    with refusals_of_megatron():
        set_global_variables(args)
    return args


def check(
    args: argparse.Namespace, argv: Sequence[str], on_cpu: bool, has: Callable[[str], bool] = is_installed
) -> None:
    """Check parsed arguments, and set arguments that the device, the features and Megatron determine.

    Args:
        args: result of Megatron's parser.
        argv: command line that was parsed.
        on_cpu: whether the training runs on CPU.
        has: see ``set_device_defaults``.

    Raises ValueError for settings that cannot run.
    """
    from megatron.training.arguments import validate_args

    from megatron.bytescale.arguments.model_config import check_configurations

    trust_checkpoints(args.trust_checkpoint)
    reasons = Reasons()
    with reasons.collect():
        check_values(args)
    with reasons.collect():
        set_device_defaults(args, argv, on_cpu, has)
    with reasons.collect():
        pad_vocabulary(args)
    with reasons.collect():
        features.check(args)
    reasons.refuse()
    args.eval_interval = args.eval_interval or NEVER
    with refusals_of_megatron(), _unprinted_arguments():
        validate_args(args)
        features.check_after(args)
    engine_is_elsewhere = args.transformer_impl == ENGINE and not is_installed(ENGINE)
    with refusals_of_megatron():
        check_configurations(args, engine_is_elsewhere)


@contextlib.contextmanager
def _unprinted_arguments() -> Iterator[None]:
    """Leave the arguments out of what Megatron's checks print: a refusal would stand above a thousand lines."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        before, _, dump = text.getvalue().partition(f"{'-' * 24} arguments ")
        after = dump.partition(f"end of arguments {'-' * 21}\n")[2]
        print(before + after, end="", flush=True)


def print_arguments(args: argparse.Namespace) -> None:
    """Print the arguments as Megatron does, on the first rank, once nothing refuses them."""
    from megatron.training.arguments import _print_args

    _print_args("arguments", args)


@functools.cache
def whole_parser() -> argparse.ArgumentParser:
    """Return Megatron's parser with our flags, for command lines of other processes; it raises ArgumentError."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    return add_arguments(add_megatron_arguments(parser))


@contextlib.contextmanager
def command_line(argv: Sequence[str]) -> Iterator[None]:
    """Temporarily make ``argv`` the command line of the process, which Megatron's parser reads."""
    own, sys.argv = sys.argv, list(argv)
    try:
        yield
    finally:
        sys.argv = own
