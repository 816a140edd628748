"""Checks values of Megatron's flags that Megatron accepts wrongly, or refuses without naming the flag."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bytescale_ext.json_input import check_stored
from bytescale_ext.new_file import check_writable_folder
from megatron.bytescale.arguments.bad_input import Reasons
from megatron.bytescale.arguments.divisions import Divisions
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.arguments.running import SavedFolders
from megatron.bytescale.arguments.schedules import Schedules
from megatron.bytescale.checkpoints import links_to_overwrite

MODEL: Final = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")
POSITIVE: Final = (
    *MODEL, "--ffn-hidden-size", "--moe-ffn-hidden-size", "--kv-channels", "--num-query-groups", "--vocab-size",
    "--make-vocab-size-divisible-by", "--moe-router-topk", "--recompute-num-layers", "--context-parallel-size",
    "--global-batch-size", "--micro-batch-size", "--train-samples", "--log-interval", "--save-interval",
    "--save-retain-interval", "--tensorboard-log-interval", "--distributed-timeout-minutes", "--seed",
)  # fmt: skip
_SHARE: Final = ("at least 0 and less than 1", lambda value: 0 <= value < 1)
_NOT_NEGATIVE: Final = ("at least 0", lambda value: value >= 0)
_ABOVE_ZERO: Final = ("above 0", lambda value: value > 0)
RANGES: Final[dict[str, tuple[str, Callable[[float], bool]]]] = {
    "--adam-beta1": _SHARE, "--adam-beta2": _SHARE, "--hidden-dropout": _SHARE, "--attention-dropout": _SHARE,
    "--adam-eps": _NOT_NEGATIVE, "--init-method-std": _NOT_NEGATIVE, "--norm-epsilon": _NOT_NEGATIVE,
    "--loss-scale": _NOT_NEGATIVE, "--initial-loss-scale": _ABOVE_ZERO, "--rotary-base": _ABOVE_ZERO,
    "--rotary-percent": ("above 0 and at most 1", lambda value: 0 < value <= 1),
}  # fmt: skip
"""Flag -> the numbers that it takes, in words and as a test."""
MOST: Final = 1 << 40  # larger numbers of tokens, layers or samples are typing errors
FOLDERS: Final = ("--save", "--load", "--tensorboard-dir", "--hdp-log-dir", "--data-cache-path")
WRITTEN: Final = ("--save", "--tensorboard-dir", "--hdp-log-dir")
READ: Final = ("--data-args-path", "--per-split-data-args-path", "--vocab-file", "--merge-file", "--tokenizer-model")
RECORDED_STEPS: Final = ("--hdp-timeline-step", "--hdp-memory-step")
HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # other names are local folders
HUB_KINDS: Final = ("HuggingFaceTokenizer", "SFTTokenizer")
# Type of tokenizer -> model that Megatron takes from the hub, even if --vocab-file is given.
HUB_MODELS: Final = {
    "GPT2BPETokenizer": "gpt2",
    "BertWordPieceLowerCase": "bert-large-uncased",
    "BertWordPieceCase": "bert-large-cased",
}
SECONDS_TO_CONNECT: Final = 10.0  # timeout for the tokenizer hub
# Type of tokenizer -> package that Megatron's tokenizer of this type imports.
PACKAGES: Final = {
    "HuggingFaceTokenizer": "transformers",
    "SFTTokenizer": "transformers",
    "GPT2BPETokenizer": "transformers",
    "BertWordPieceLowerCase": "transformers",
    "BertWordPieceCase": "transformers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}

# Type of tokenizer -> flags of its files, which Megatron downloads if they are not given.
VOCABULARY_FILES: Final = {
    "GPT2BPETokenizer": ("--vocab-file", "--merge-file"),
    "BertWordPieceLowerCase": ("--vocab-file",),
    "BertWordPieceCase": ("--vocab-file",),
}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of a training, before Megatron checks them; None: not given."""

    num_layers: int | None
    hidden_size: int | None
    num_attention_heads: int | None
    kv_channels: int | None
    ffn_hidden_size: int | None
    moe_ffn_hidden_size: int | None
    num_query_groups: int | None
    vocab_size: int | None
    make_vocab_size_divisible_by: int | None
    moe_router_topk: int | None
    recompute_num_layers: int | None
    context_parallel_size: int | None
    distributed_timeout_minutes: int | None
    seed: int | None
    num_experts: int | None
    multi_latent_attention: bool
    position_embedding_type: str
    rotary_percent: float
    seq_length: int | None
    max_position_embeddings: int | None
    global_batch_size: int | None
    micro_batch_size: int | None
    train_samples: int | None
    train_iters: int | None
    log_interval: int | None
    save_interval: int | None
    save_retain_interval: int | None
    tensorboard_log_interval: int | None
    rampup_batch_size: list[int] | None
    step_batch_size_schedule: str | None
    skip_train: bool
    eval_iters: int | None
    eval_interval: int | None
    full_validation: bool
    use_checkpoint_args: bool
    yaml_cfg: str | None
    hdp_tokens_per_rank: int | None = None
    hdp_timeline_step: int | None = None
    hdp_memory_step: int | None = None

    def of(self, flag: str) -> int | None:
        """Return the size given by a flag."""
        size: int | None = getattr(self, _name_of(flag))
        return size


@dataclass(frozen=True)
class Rates:
    """Numbers of Megatron's flags that have limits (``RANGES``); None: not given."""

    adam_beta1: float
    adam_beta2: float
    adam_eps: float
    hidden_dropout: float
    attention_dropout: float
    init_method_std: float
    layernorm_epsilon: float
    rotary_percent: float
    rotary_base: float
    loss_scale: float | None
    initial_loss_scale: float | None

    def wrong(self) -> Iterator[str]:
        """Yield a reason for each number outside its range."""
        for flag, (text, holds) in RANGES.items():
            value = getattr(self, "layernorm_epsilon" if flag == "--norm-epsilon" else _name_of(flag))
            if value is not None and not holds(value):
                yield f"{flag} {value:g} must be {text}"


@dataclass(frozen=True, kw_only=True)
class Folders(SavedFolders):
    """Folders that a training reads and writes; None: not given."""

    save_interval: int | None
    load: str | None
    tensorboard_dir: str | None
    data_cache_path: str | None
    hdp_log_dir: Path | None = None

    def of(self, flag: str) -> Path | None:
        """Return the folder given by a flag."""
        folder: str | Path | None = getattr(self, _name_of(flag))
        return None if folder is None else Path(folder)

    def written(self) -> Iterator[tuple[str, Path]]:
        """Yield (flag, folder) of each folder that a training writes to."""
        return ((flag, folder) for flag in WRITTEN if (folder := self.of(flag)) is not None)


@dataclass(frozen=True)
class ReadFiles:
    """Files that Megatron reads whole; None: not given."""

    data_args_path: str | None = None
    per_split_data_args_path: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_model: str | None = None

    def wrong(self) -> Iterator[str]:
        """Yield a reason for each file without an end, or with holes."""
        for flag in READ:
            path = getattr(self, _name_of(flag))
            try:
                if path is not None and os.path.exists(path) and not os.path.isdir(path):
                    check_stored(path)
            except OSError as error:
                yield f"{flag} {path}: {error.strerror}"


@dataclass(frozen=True)
class Split:
    """The shares of training, validation and test, as text."""

    split: str | None


@dataclass(frozen=True)
class TokenizerChoice:
    """A tokenizer; None: not given."""

    tokenizer_type: str | None
    tokenizer_model: str | None = None
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_size: int | None = None


def check_values(args: argparse.Namespace) -> None:
    """Check sizes, schedules, shares, folders and the tokenizer, before anything is built.

    Raises ``Refused`` with every reason, each naming a flag.
    """
    reasons = Reasons()
    reasons.add(*_wrong_sizes(options_of(args, Sizes)), *wrong_folders(options_of(args, Folders)))
    reasons.add(*options_of(args, Schedules).wrong(), *options_of(args, ReadFiles).wrong())
    reasons.add(*options_of(args, Divisions).wrong(), *options_of(args, Rates).wrong())
    with reasons.collect():
        _check_split(options_of(args, Split).split)
    with reasons.collect():
        check_tokenizer(options_of(args, TokenizerChoice))
    reasons.refuse()


def _name_of(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _wrong_sizes(sizes: Sizes) -> Iterator[str]:
    """Yield a reason for each size that no model or training can have."""
    missing = [flag for flag in MODEL[:3] if sizes.of(flag) is None]
    reads_sizes = sizes.use_checkpoint_args or sizes.yaml_cfg is not None
    if missing and not reads_sizes:
        yield f"no {', '.join(missing)}: give the model; the README has a complete launch line"
    for flag in POSITIVE:
        value = sizes.of(flag)
        if value is not None and not 1 <= value <= MOST:
            yield f"{flag} {value} must be at least 1" + (" and at most 2^40" if value > MOST else "")
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    if sizes.kv_channels is None and hidden and heads and hidden % heads:
        yield f"--hidden-size {hidden} must be a multiple of --num-attention-heads {heads}"
    yield from _wrong_heads(sizes)
    tokens = sizes.hdp_tokens_per_rank
    if tokens is not None and tokens > MOST:
        yield f"--hdp-tokens-per-rank {tokens} must be at most 2^40"
    iterations = sizes.train_iters
    if iterations is not None and iterations < (0 if sizes.skip_train else 1):
        yield f"--train-iters {iterations}: nothing to train; give at least 1"
    samples, step = sizes.train_samples, sizes.global_batch_size
    grows = sizes.rampup_batch_size or sizes.step_batch_size_schedule
    if samples and step and 0 < samples < step and not grows and not sizes.skip_train:
        yield f"--train-samples {samples}: nothing to train; a step has --global-batch-size {step}"
    if sizes.eval_iters and sizes.eval_interval is None and not (sizes.skip_train or sizes.full_validation):
        yield (
            f"--eval-iters {sizes.eval_iters} needs --eval-interval, the steps from one evaluation to the next; "
            "--eval-iters 0 leaves evaluations out"
        )
    for flag in RECORDED_STEPS:
        step = sizes.of(flag)
        if step is not None and step < 1:
            yield f"{flag} {step}: iterations begin at 1"
        if step is not None and iterations and step > iterations and os.environ.get("RANK", "0") == "0":
            print(f"warning: {flag} {step} is after the last iteration, {iterations}: nothing will be recorded")


def _wrong_heads(sizes: Sizes) -> Iterator[str]:
    """Yield a reason for heads that rotary embeddings cannot turn, and for more routes than experts."""
    hidden, heads = sizes.hidden_size, sizes.num_attention_heads
    channels = sizes.kv_channels or (hidden // heads if hidden and heads and heads > 0 else None)
    if channels and sizes.position_embedding_type in ("rope", "yarn") and not sizes.multi_latent_attention:
        if int(channels * sizes.rotary_percent) % 2:
            name = "--kv-channels" if sizes.kv_channels else "--hidden-size / --num-attention-heads ="
            yield f"{name} {channels}: rotary embeddings turn pairs, so the turned channels of a head must be even"
    if sizes.num_experts and sizes.moe_router_topk and sizes.moe_router_topk > sizes.num_experts:
        yield f"--moe-router-topk {sizes.moe_router_topk} must be at most --num-experts {sizes.num_experts}"


def _check_split(split: str | None) -> None:
    """Raise ValueError for a ``--split`` that is not a list of up to three shares."""
    if split is None:
        return
    try:
        shares = [float(part) for part in split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or not sum(shares):
        raise ValueError(f"--split {split}: give the shares of training, validation and test, such as 99,1,0")


def wrong_folders(folders: Folders) -> Iterator[str]:
    """Yield a reason for each folder that is a file or cannot be created. Creates none: the run may be refused."""
    if folders.save is not None and folders.save_interval is None:
        yield f"--save {folders.save} needs --save-interval: the iterations from one checkpoint to the next"
    for link in (link for save in folders.paths() for link in links_to_overwrite(save)):
        yield f"--save {link} is a link, whose target Megatron would overwrite: remove it"
    if folders.tensorboard_dir is not None:  # names of the log are its second, host and process
        for path in Path(folders.tensorboard_dir).glob("events.out.*"):
            if path.is_symlink():
                yield f"--tensorboard-dir {path} is a link, whose target TensorBoard could overwrite: remove it"
    for flag in FOLDERS:
        folder = folders.of(flag)
        if folder is not None and folder.exists() and not folder.is_dir():
            yield f"{flag} {folder} is a file; give a folder"
    for flag, folder in folders.written():
        there = next(path for path in (folder, *folder.parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            reason = "no permission for" if there.is_dir() else "not a folder:"
            yield f"{flag} {folder} cannot be written ({reason} {there}); choose another folder"


def make_folders(folders: Folders) -> None:
    """Create the folders that a run writes to before it needs them for a save. Raises ValueError naming the flag."""
    for flag, folder in folders.written():
        _check_writable(flag, folder)


def check_file(flag: str, path: Path) -> None:
    """Raise ValueError naming the flag if a file cannot be written there. Creates no file."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ValueError(f"{flag} {path} cannot be written; choose a file in an existing folder")


def _check_writable(flag: str, folder: Path) -> None:
    try:
        check_writable_folder(folder)
    except OSError as error:
        raise ValueError(f"{flag} {folder} cannot be written ({error.strerror}); choose another folder") from error


def check_tokenizer(tokenizer: TokenizerChoice) -> None:
    """Raise ValueError if a tokenizer lacks its package, model, files or vocabulary."""
    kind = tokenizer.tokenizer_type
    if kind is None:
        raise ValueError("no --tokenizer-type: give the tokenizer that wrote the data (`bytescale corpus` prints it)")
    for flag in ("--tokenizer-model", "--vocab-file", "--merge-file"):
        path = getattr(tokenizer, _name_of(flag))
        is_hub_name = flag == "--tokenizer-model" and kind in HUB_KINDS and HUB_NAME.fullmatch(str(path))
        if path is not None and not is_hub_name and not Path(path).exists():
            raise ValueError(f"{flag} {path}: no such file")
    package = PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"--tokenizer-type {kind}: {package} is not installed; run pip install -e '.[tokenizers]'")
    if kind == "NullTokenizer" and tokenizer.vocab_size is None:
        raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size (`bytescale corpus` prints it)")
    missing = [flag for flag in VOCABULARY_FILES.get(kind, ()) if getattr(tokenizer, _name_of(flag)) is None]
    if missing:
        raise ValueError(
            f"--tokenizer-type {kind} needs {' and '.join(missing)}: without the files Megatron downloads a vocabulary"
        )
    if package is not None and kind not in HUB_MODELS and tokenizer.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {kind} needs --tokenizer-model")
    model = tokenizer.tokenizer_model
    if kind == "TikTokenizer" and not (model and model.endswith(".json")):
        raise ValueError(f"--tokenizer-model {model}: a TikTokenizer's vocabulary is a .json file")
    if kind in HUB_KINDS and model and not Path(model).exists():
        _check_hub("--tokenizer-model", model)
    if kind in HUB_MODELS:
        _check_hub(f"--tokenizer-type {kind}: model", HUB_MODELS[kind])


def _check_hub(flag: str, name: str) -> None:
    """Raise ValueError for a hub model if the hub cannot be reached; transformers would retry for minutes."""
    hub = importlib.import_module("huggingface_hub")
    is_here = isinstance(hub.try_to_load_from_cache(name, "tokenizer_config.json"), str)
    if is_here or hub.constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    address = urllib.parse.urlsplit(hub.constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise ValueError(
            f"{flag} {name}: no such folder, not in Hugging Face's cache, and {address.hostname} "
            f"cannot be reached ({error.strerror or error}); give the path of a folder"
        ) from error
