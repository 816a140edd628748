"""Change a launch line of Megatron so that it trains with hybrid data parallelism.

The changes follow from the table of refusals. A row that says to remove, add or replace a flag is applied; other rows
need a decision. The memory of the fullest device is forecast for a line that can run. The only file that is read is a
cost file in the line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import math
import re
import shlex
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from bytescale_ext.plan.setup.forecast import Forecast
from megatron.bytescale import features
from megatron.bytescale.arguments.bad_input import reasons_of, refusals_of_megatron
from megatron.bytescale.arguments.data import DataPaths
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.parse import ENGINE, named_or_installed, set_device_defaults, whole_parser
from megatron.bytescale.arguments.renamed import refuse_words
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.arguments.units import ALSO, CountedFlags
from megatron.bytescale.cli.shared.inputs import launch_words
from megatron.bytescale.cli.shared.model_flags import FLAG, USUAL_VOCAB, arguments_of

SCRIPTS: Final = ("pretrain_gpt.py", "pretrain_gpt_hdp.py")
DONE_BY_PLAN: Final = "the plan decides how documents are packed"
_DROP: Final = re.compile(
    r"(remove it:|leave it|give (--hdp-tokens-per-rank|--overlap-param-gather alone)|choose one: --hybrid|"
    r".*in its place)"
)
_UNREAD: Final = re.compile(r"add (.+), or remove (--[a-z0-9-]+|it)$")
_ADD: Final = re.compile(r"add (--[a-z0-9-]+)(?: (\w+))?(?=$|[,:]| \()")
_INSTEAD: Final = re.compile(r"use (--[a-z0-9-]+)(?: (\w+))?(?! or)(?!, or)(?=$|[,:]| in its place)")
_LEAVE_OUT: Final = re.compile(r"leave (\w+) out")
_VALUE: Final = re.compile(r"use (\w+)(?=:|$)")
_SAME_TRAINING: Final = ("--moe-token-dispatcher-type", "--transformer-impl", "--ckpt-format")
"""Flags whose values train the same model in the same way."""


@dataclass(frozen=True)
class LineChange:
    """One change of a launch line.

    Attributes:
        what: remove, add, replace, means or decide. "means": the line keeps a flag whose unit changes. A decision is
            left to the reader.
        flag: words of the line.
        why: reason or advice.
    """

    what: str
    flag: str
    why: str


@dataclass(frozen=True)
class Migration:
    """A launch line with hybrid data parallelism, and its changes.

    Attributes:
        line: words of the line.
        changes: changes, in order.
        device_gb: forecast memory of the fullest device, in GB, with full micro-batches that run whole; None if
            a decision is left to the reader, or the number of processes is unknown.
    """

    line: tuple[str, ...]
    changes: tuple[LineChange, ...]
    device_gb: float | None = None

    @property
    def runs(self) -> bool:
        """Whether no decision is left to the reader."""
        return all(change.what != "decide" for change in self.changes)


@dataclass
class _Line:
    """A launch line that is being changed: the words before the flags of the training, the flags, and the device."""

    head: list[str]
    flags: list[str]
    on_cpu: bool
    changes: list[LineChange] = field(default_factory=list)

    def place(self, flag: str) -> tuple[int, int] | None:
        """Return the places of a flag and its values in ``flags``: [first, end), or None."""
        for first, word in enumerate(self.flags):
            if word.split("=")[0] == flag:
                after = (
                    place for place, later in enumerate(self.flags[first + 1 :], first + 1) if later.startswith("--")
                )
                return first, first + 1 if "=" in word else next(after, len(self.flags))
        return None

    def remove(self, flag: str, why: str) -> bool:
        """Remove a flag and its values; return whether the line had it."""
        place = self.place(flag)
        if place is None:
            return False
        words = self.flags[slice(*place)]
        del self.flags[slice(*place)]
        self.changes.append(LineChange("remove", shlex.join(words), why))
        return True

    def leave_out(self, flag: str, value: str, why: str) -> bool:
        """Remove one of the values of a flag, and a flag without values; return whether the line had the value."""
        place = self.place(flag)
        if place is None or value not in (words := self.flags[slice(*place)]):
            return False
        left = [word for word in words if word != value]
        return self.put(left, why) if len(left) > 1 else self.remove(flag, why)

    def put(self, words: list[str], why: str) -> bool:
        """Set the value of a flag; return True."""
        place = self.place(words[0])
        before = shlex.join(self.flags[slice(*place)]) + " -> " if place is not None else ""
        self.flags[slice(*(place or (0, 0)))] = words
        self.changes.append(LineChange("replace" if before else "add", before + shlex.join(words), why))
        return True


def migrate(line: str, num_processes: int | None = None, on_cpu: bool = False) -> Migration:
    """Return a launch line with hybrid data parallelism.

    Args:
        line: torchrun or python with its options, the script, and its flags; or flags alone.
        num_processes: processes of the run; default: torchrun's processes, if the line has them in numbers.
        on_cpu: whether the run has no GPUs, as with ``--cpu`` in the line.

    Raises:
        ValueError: the line cannot be split into words, or starts another script.
    """
    changed = _split(line, on_cpu)
    num_processes = num_processes or _processes(changed.head)
    args = _parsed(changed)
    given = options_of(args, _Given)
    _name_units(changed, args, given)
    _replace_mesh(changed, given)
    if given.eval_interval is None and given.eval_iters:
        changed.put(["--eval-interval", "1000"], "Megatron 0.19.2 has no default, earlier versions had this one")
    _decide_samples(changed, given)
    _keep_tokens(changed, given, num_processes)
    _heed_refusals(changed)
    forecast = _check(changed, num_processes)
    migration = Migration((*changed.head, *changed.flags), tuple(changed.changes))
    return replace(migration, device_gb=forecast) if migration.runs else migration


def _split(line: str, on_cpu: bool) -> _Line:
    words = launch_words(line)
    scripts = [place for place, word in enumerate(words) if word.endswith(".py")]
    if not scripts:
        return _Line([], words, on_cpu or "--cpu" in words)
    head, name = words[: scripts[0] + 1], words[scripts[0]].split("/")[-1]
    if name not in SCRIPTS:
        raise ValueError(f"--launch: {name} is another script: only lines of pretrain_gpt.py can be changed")
    changed = _Line(head, words[scripts[0] + 1 :], on_cpu or "--cpu" in words)
    if name != SCRIPTS[1]:
        changed.head[-1] = SCRIPTS[1]
        changed.changes.append(
            LineChange("replace", f"{name} -> {SCRIPTS[1]}", "the same training loop, with our flags")
        )
    return changed


def _processes(head: list[str]) -> int | None:
    """Return the number of processes that torchrun starts; None if the line does not have it as a number."""
    counts = {"--nnodes": 1, "--nproc-per-node": 1}
    joined = " ".join(head).replace("=", " ").replace("_", "-")
    for name in counts:
        if match := re.search(rf"{name} (\S+)", joined):
            if not match[1].isdigit():
                return None
            counts[name] = int(match[1])
    return math.prod(counts.values()) if "--nproc-per-node" in joined else None


def _parsed(line: _Line) -> argparse.Namespace:
    """Return the arguments of the flags, after removing flags that Megatron 0.19.2 does not have."""
    refuse_words(line.flags)
    try:
        with contextlib.redirect_stderr(io.StringIO()), refusals_of_megatron():
            args, rest = whole_parser().parse_known_args(_as_trained(line))
    except (argparse.ArgumentError, SystemExit, ValueError) as error:
        raise ValueError(f"--launch: {error}: give the words with values, without variables of a shell") from error
    for word in rest:
        if word.startswith("--"):
            line.remove(word.split("=")[0], "Megatron 0.19.2 has no such flag")
    args.rank = 0
    with contextlib.suppress(ValueError):  # the last check reports it
        words = _as_trained(line)
        set_device_defaults(args, words, line.on_cpu, named_or_installed(words))
    return args


def _as_trained(line: _Line) -> list[str]:
    """Return the flags, with Megatron's default layers by name if the line trains on GPUs of another machine.

    Without the name, the packages of this machine would decide.
    """
    if line.on_cpu or line.place("--transformer-impl") is not None or _has_gpu():
        return line.flags
    return [*line.flags, "--transformer-impl", "transformer_engine"]


def _has_gpu() -> bool:
    """Return whether this machine has a GPU; the stand-ins for CUDA have no compute capability."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() > (0, 0)


@dataclass(frozen=True)
class _Given:
    """Sizes and steps of a launch line, named as Megatron's arguments."""

    hybrid_data_parallel: bool
    context_parallel_size: int | None
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    sequence_parallel: bool
    transformer_impl: str
    seq_length: int | None
    hdp_tokens_per_rank: int | None
    hdp_global_tokens: int | None
    global_batch_size: int | None
    micro_batch_size: int | None
    step_batch_size_schedule: str | None
    rampup_batch_size: list[str] | None
    train_samples: int | None
    eval_interval: int | None
    eval_iters: int
    sft: bool

    @property
    def counts_samples(self) -> bool:
        """Whether the duration or the size of steps is a number of samples, which becomes a number of documents."""
        return bool(self.train_samples or self.rampup_batch_size or self.step_batch_size_schedule)


def _name_units(line: _Line, args: argparse.Namespace, given: _Given) -> None:
    """Name the quantities that count documents from now on, and keep the meaning of a blend's weights."""
    if given.hybrid_data_parallel:
        return
    for flag, unit in options_of(args, CountedFlags).given().items():
        if line.place(flag) is not None:
            line.changes.append(LineChange("means", flag, unit))
    line.changes.append(LineChange("means", "", f"these count documents too: {ALSO}"))
    if _is_weighted(options_of(args, DataPaths)):
        line.put(["--hdp-blend-by", "tokens"], "weights of the data path stay shares of tokens; else of documents")


def _is_weighted(paths: DataPaths) -> bool:
    """Return whether a blend has weights; False if they are in a file that this machine does not have."""
    try:
        with refusals_of_megatron():
            together, of_splits = paths.blends()
    except (OSError, ValueError):
        return False
    return any(blend is not None and blend[1] is not None for blend in of_splits or [together])


def _replace_mesh(line: _Line, given: _Given) -> None:
    """Replace context parallelism and micro-batches of one size by ranks for each document."""
    width = given.context_parallel_size or 1
    if not given.hybrid_data_parallel:
        line.put(["--hybrid-data-parallel"], "each document gets as many ranks as it needs")
    line.remove("--context-parallel-size", "--hybrid-data-parallel gives each document its own width")
    line.remove("--micro-batch-size", DONE_BY_PLAN)
    if line.on_cpu and given.transformer_impl == ENGINE and line.place("--transformer-impl") is not None:
        line.put(["--transformer-impl", "local"], "TransformerEngine needs a GPU")
    if given.seq_length is None:
        line.changes.append(
            LineChange("decide", "--seq-length", "give the longest sample: longer documents are cut there")
        )
    elif given.hdp_tokens_per_rank is None:
        multiple = given.tensor_model_parallel_size if given.sequence_parallel else 1
        samples = given.micro_batch_size or 1
        tokens = -(-samples * given.seq_length // width)
        tokens += -tokens % multiple
        why = (
            f"C, the tokens that a rank held before: {samples} x --seq-length / {width}; larger is faster until memory "
            "runs out"
        )
        line.put(["--hdp-tokens-per-rank", str(tokens)], why)


def _decide_samples(line: _Line, given: _Given) -> None:
    """Leave numbers of samples to the reader: a sample had ``--seq-length`` tokens, and a document has fewer."""
    if given.hybrid_data_parallel or not given.counts_samples or given.seq_length is None:
        return
    length, size = given.seq_length, given.global_batch_size
    steps = f" in steps of {size * length:,}" if size else ""
    advice = "divide the numbers of samples by the documents of --seq-length tokens that a sample was"
    if given.train_samples:
        were = (
            f"{given.train_samples:,} samples of {length:,} tokens were {given.train_samples * length:,} tokens{steps}"
        )
        advice = (
            f"give --train-samples {given.train_samples * length} / T, with T the mean tokens of a document "
            "(`bytescale corpus` prints it), and change the other numbers of samples in the same way"
        )
        if size and not given.rampup_batch_size and not given.step_batch_size_schedule:
            advice += (
                f"; or --train-iters {given.train_samples // size} --hdp-global-tokens {size * length} in place of it"
            )
    else:
        were = f"samples of {length:,} tokens{steps}"
    flags = ("--train-samples", "--rampup-batch-size", "--step-batch-size-schedule")
    flag = next(one for one in flags if line.place(one) is not None)
    line.changes.append(LineChange("decide", flag, f"{were}; as many documents hold fewer: {advice}"))


def _keep_tokens(line: _Line, given: _Given, num_processes: int | None) -> None:
    """Count documents instead of samples of one length, and keep the tokens of a step."""
    size = given.global_batch_size
    if size is None and given.step_batch_size_schedule is None:
        line.changes.append(LineChange("decide", "--global-batch-size", "give it: the documents of a step"))
        return
    if size is None:
        return
    fixed = given.hybrid_data_parallel or given.counts_samples or given.hdp_global_tokens
    if not fixed and given.seq_length is not None and not given.sft:
        tokens = size * given.seq_length
        line.put(
            ["--hdp-global-tokens", str(tokens)], f"the tokens of a step as before; {size} documents may hold fewer"
        )
    model = given.tensor_model_parallel_size * given.pipeline_model_parallel_size
    if num_processes is not None and num_processes % model == 0 and size % (num_processes // model):
        ranks = num_processes // model
        rounded = str(-(-size // ranks) * ranks)
        line.put(
            ["--global-batch-size", rounded], f"it counts documents, in multiples of the {ranks} data-parallel ranks"
        )


def _heed_refusals(line: _Line) -> None:
    """Apply the rows of the table of refusals until no row refuses the line."""
    settled: set[str] = set()
    while True:
        args = _parsed(line)
        on = {feature.name: feature.switch(args) for feature in features.enabled(args)} | {"always": "bytescale"}
        rows = [row for row in features.refusals() if row.flag not in settled and on.keys() & row.instead.keys()]
        row = next((row for row in rows if row.applies(args)), None)
        if row is None:
            return
        settled.add(row.flag)
        name = next(name for name in on if name in row.instead)
        advice = row.instead[name].format(on[name])
        if not _follow(line, row.flag, advice):
            line.changes.append(LineChange("decide", row.flag, advice))


def _follow(line: _Line, setting: str, advice: str) -> bool:
    """Change a line as the advice of a refused setting says; return whether the advice leaves nothing to decide.

    A flag that nothing reads is removed, so that the line trains as it did. A flag that takes a value is added with its
    value only.
    """
    flag, is_whole = setting.split()[0], len(setting.split()) == 1
    if unread := _UNREAD.match(advice):
        return line.remove(flag, f"nothing reads it without {unread[1]}")
    if (added := _ADD.match(advice)) and (words := _words(added[1], added[2])):
        line.put(words, advice)
        return True
    if left := _LEAVE_OUT.match(advice):
        return line.leave_out(flag, left[1], advice)
    if (value := _VALUE.match(advice)) and flag in _SAME_TRAINING:
        line.put([flag, value[1]], advice)
        return True
    if instead := _INSTEAD.match(advice):
        words, is_there = _words(instead[1], instead[2]), line.place(instead[1]) is not None
        if instead[1] != flag and (is_whole or "in its place" in advice) and (words or is_there):
            return line.remove(flag, advice) and (is_there or line.put(words, f"in place of {flag}"))
        if instead[2] and words:
            return line.put(words, advice)
        return False
    return bool(_DROP.match(advice)) and line.remove(flag, advice)


def _words(flag: str, value: str | None) -> list[str]:
    """Return a flag and its value as Megatron's parser needs them; empty if the value is missing."""
    action = whole_parser()._option_string_actions.get(flag)
    if action is None:
        return []
    return [flag] if action.nargs == 0 else [flag, value] if value else []


def _check(line: _Line, num_processes: int | None) -> float | None:
    """Return the forecast memory of the fullest device, in GB, of a line that can run; None without its processes.

    Adds a decision for each reason why training refuses the line.
    """
    args = _parsed(line)
    sizes = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    processes = num_processes or sizes * (args.global_batch_size or 1)
    words = [word for word in _as_trained(line) if word != "--cpu"]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            args = arguments_of(words, on_cuda=not line.on_cpu, processes=processes)
            args.fake_process_group = True  # the training may run on another machine
            decision = resolve(args).decision
    except ValueError as error:
        reasons = [reason.removeprefix(f"{FLAG}: ") for reason in reasons_of(error)]
        said = [change.why for change in line.changes if change.what == "decide"]
        new = [reason for reason in reasons if not any(why in reason for why in said)]
        line.changes += [LineChange("decide", "", reason) for reason in new]
        return None
    except OSError:  # a file of another machine
        return None
    return None if num_processes is None else Forecast(decision).full_bytes[0] / 1e9


def changes_text(migration: Migration) -> str:
    """Return the changes, the forecast and the line as text."""
    width = max((len(change.flag) for change in migration.changes), default=0)
    lines = [f"{change.what:8} {change.flag:{min(width, 60)}}  {change.why}" for change in migration.changes]
    if migration.device_gb is not None:
        vocab = "" if "--vocab-size" in migration.line else f", for a vocabulary of {USUAL_VOCAB:,}"
        lines += ["", f"forecast memory of the fullest device: {migration.device_gb:.4g} GB{vocab}"]
    runs = "the line with hybrid data parallelism:"
    title = runs if migration.runs else "not yet: decide as marked; the line so far:"
    return "\n".join([*lines, "", title, shlex.join(migration.line)])
