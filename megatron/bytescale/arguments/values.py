"""Values of Megatron's flags that Megatron lets through, or refuses in words that name no flag."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any, Final

MODEL: Final = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--max-position-embeddings")
POSITIVE: Final = (*MODEL, "--global-batch-size", "--micro-batch-size", "--train-samples")
MOST: Final = 1 << 40  # tokens, layers and samples beyond it are typing errors
FOLDERS: Final = ("--save", "--load", "--tensorboard-dir", "--hdp-log-dir", "--data-cache-path")
WRITTEN: Final = ("--save", "--tensorboard-dir", "--hdp-log-dir")
RECORDED_STEPS: Final = ("--hdp-timeline-step", "--hdp-memory-step")
HUB_NAME: Final = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # other names are folders of this machine
HUB_KINDS: Final = ("HuggingFaceTokenizer", "SFTTokenizer")
SECONDS_TO_CONNECT: Final = 10.0  # to the hub of tokenizers
# The package that Megatron's tokenizer of a type imports.
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


def check_values(args: Any) -> None:
    """Check sizes, shares, folders and the tokenizer, before anything is built. Raises ValueError naming the flag."""
    _check_sizes(args)
    _check_split(args)
    _check_folders(args)
    check_tokenizer(args)


def value_of(args: Any, flag: str) -> Any:
    """Return the value of a flag; None where it was not given."""
    return getattr(args, flag.removeprefix("--").replace("-", "_"), None)


def _check_sizes(args: Any) -> None:
    missing = [flag for flag in MODEL[:3] if value_of(args, flag) is None]
    reads_sizes = args.use_checkpoint_args or args.yaml_cfg is not None
    if missing and not reads_sizes:
        raise ValueError(f"no {', '.join(missing)}: give the model; the README has a whole launch line to begin with")
    for flag in POSITIVE:
        value = value_of(args, flag)
        if value is not None and not 1 <= value <= MOST:
            raise ValueError(f"{flag} {value} must be at least 1" + (" and at most 2^40" if value > MOST else ""))
    if args.kv_channels is None and args.hidden_size and args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} must be a multiple of --num-attention-heads {args.num_attention_heads}"
        )
    tokens = args.hdp_tokens_per_rank
    if tokens is not None and tokens > MOST:
        raise ValueError(f"--hdp-tokens-per-rank {tokens} must be at most 2^40")
    iterations = args.train_iters
    if iterations is not None and iterations < (0 if args.skip_train else 1):
        raise ValueError(f"--train-iters {iterations}: nothing to train; give at least 1")
    for flag in RECORDED_STEPS:
        step = value_of(args, flag)
        if step is not None and step < 1:
            raise ValueError(f"{flag} {step}: iterations begin with 1")
        if step is not None and iterations and step > iterations and os.environ.get("RANK", "0") == "0":
            print(f"warning: {flag} {step} is after the last iteration, {iterations}: nothing will be recorded")


def _check_split(args: Any) -> None:
    """Raise ValueError for a ``--split`` that is not up to three shares."""
    if args.split is None:
        return
    try:
        shares = [float(part) for part in args.split.replace("/", ",").split(",")]
    except ValueError:
        shares = []
    if not 1 <= len(shares) <= 3 or not all(0 <= share < math.inf for share in shares) or not sum(shares):
        raise ValueError(f"--split {args.split}: give the shares of training, validation and test, such as 99,1,0")


def _check_folders(args: Any) -> None:
    """Raise ValueError if a folder is a file, or none can be made there. Makes none: the line may yet be refused."""
    if args.save is not None and args.save_interval is None:
        raise ValueError(f"--save {args.save} needs --save-interval: the iterations from one checkpoint to the next")
    for flag in FOLDERS:
        folder = value_of(args, flag)
        if folder is not None and Path(folder).exists() and not Path(folder).is_dir():
            raise ValueError(f"{flag} {folder} is a file; give a folder")
    for flag in WRITTEN:
        folder = value_of(args, flag)
        if folder is None:
            continue
        there = next(path for path in (Path(folder), *Path(folder).parents) if path.exists())
        if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
            reason = "no permission for" if there.is_dir() else "not a folder:"
            raise ValueError(f"{flag} {folder} cannot be written ({reason} {there}); choose another folder")


def make_folders(args: Any) -> None:
    """Make the folders that a run writes to, before its first save needs one. Raises ValueError naming the flag."""
    for flag in WRITTEN:
        folder = value_of(args, flag)
        if folder is not None:
            _check_writable(flag, Path(folder))


def check_file(flag: str, path: Path) -> None:
    """Raise ValueError naming the flag if no file can be written there. Makes none."""
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK) or path.is_dir():
        raise ValueError(f"{flag} {path} cannot be written; choose a file in an existing folder")


def _check_writable(flag: str, folder: Path) -> None:
    probe = folder / f".writable-{os.environ.get('RANK', '0')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{flag} {folder} cannot be written ({error.strerror}); choose another folder") from error


def check_tokenizer(args: Any) -> None:
    """Raise ValueError for a tokenizer without its package, model, files or vocabulary."""
    kind = args.tokenizer_type
    if kind is None:
        raise ValueError("no --tokenizer-type: give the tokenizer that wrote the data (`bytescale corpus` prints it)")
    for flag in ("--tokenizer-model", "--vocab-file", "--merge-file"):
        path = value_of(args, flag)
        is_hub_name = flag == "--tokenizer-model" and kind in HUB_KINDS and HUB_NAME.fullmatch(str(path))
        if path is not None and not is_hub_name and not Path(path).exists():
            raise ValueError(f"{flag} {path}: no such file")
    package = PACKAGES.get(kind)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"--tokenizer-type {kind}: {package} is not installed; run pip install -e '.[tokenizers]'")
    if kind == "NullTokenizer" and args.vocab_size is None:
        raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size (`bytescale corpus` prints it)")
    by_files = kind in ("GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase")
    if package is not None and not by_files and args.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {kind} needs --tokenizer-model")
    if kind == "TikTokenizer" and not args.tokenizer_model.endswith(".json"):
        raise ValueError(f"--tokenizer-model {args.tokenizer_model}: a TikTokenizer's vocabulary is a .json file")
    if kind in HUB_KINDS and not Path(args.tokenizer_model).exists():
        _check_hub(args.tokenizer_model)


def _check_hub(name: str) -> None:
    """Raise ValueError for a model of a hub that cannot be reached, where transformers would try again for minutes."""
    hub = importlib.import_module("huggingface_hub")
    is_here = isinstance(hub.try_to_load_from_cache(name, "tokenizer_config.json"), str)
    if is_here or hub.constants.HF_HUB_OFFLINE or urllib.request.getproxies():
        return
    address = urllib.parse.urlsplit(hub.constants.ENDPOINT)
    try:
        socket.create_connection((address.hostname, address.port or 443), SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise ValueError(
            f"--tokenizer-model {name}: no such folder, not in the cache of Hugging Face, and {address.hostname} "
            f"cannot be reached ({error.strerror or error}); give the path of a folder"
        ) from error
