"""Models that strings of Megatron's flags describe, read by Megatron's own parser; they may train elsewhere."""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bytescale_ext.plan.activation.operators import LayerOperators
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import FUSED_ADAM, StateSizes
from bytescale_ext.plan.setup.setup import Setup
from megatron.bytescale.arguments.bad_input import Refused, reasons_of
from megatron.bytescale.arguments.renamed import refuse_words
from megatron.bytescale.cli.profile import quiet

FLAG: Final = "--model-flags"
_MODEL_SIZES: Final = ("--num-layers", "--hidden-size", "--num-attention-heads")
"""Flags without which there is no model."""

USUAL_VOCAB: Final = 32000
"""Size of the vocabulary if the flags do not give it."""

USUAL_TOKENS: Final = 4096
"""Tokens of a sequence if the flags do not give them, because Megatron's parser needs a number."""

NEEDED: Final = (("--attention-dropout", "0"), ("--hidden-dropout", "0"))
"""Flags that hybrid data parallelism needs, with the values that they get if they are missing."""

_H100: Final = (9, 0)
"""Compute capability of the GPUs of a training on another machine."""

WRITTEN: Final = ("save", "load", "tensorboard_dir", "hdp_log_dir", "data_cache_path", "record_memory_plan")
"""Arguments that name folders and files of a training."""


@dataclass(frozen=True)
class Model:
    """Traits of a model before it is built.

    Attributes:
        shape: sizes, with the vocabulary as Megatron pads it on one tensor-parallel rank.
        operators: fused operators of a layer.
        dtype: type of the parameters, for example "bfloat16".
        rows_multiple: divisor of the rows of matrix products: 16 or 32 in FP8, else 1.
        ties_embeddings: whether the input and output embedding are one matrix.
        state_sizes: bytes of the model states of a parameter.
    """

    shape: ModelShape
    operators: LayerOperators
    dtype: str
    rows_multiple: int
    ties_embeddings: bool = False
    state_sizes: StateSizes = FUSED_ADAM


def words_of(flags: str) -> list[str]:
    """Split flags as a shell does. Raises ValueError for an open quotation."""
    try:
        return shlex.split(flags)
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from None


def given_flags(words: Sequence[str]) -> set[str]:
    """Return the flags among words, without their values."""
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def with_needed(words: Sequence[str]) -> list[str]:
    """Return the flags of a model and the missing flags of ``NEEDED``."""
    given = given_flags(words)
    return [*words, *(word for flag in NEEDED if flag[0] not in given for word in flag)]


def _check_sizes(words: Sequence[str]) -> None:
    """Raise ValueError if the sizes of a model are missing, before Megatron is imported, which takes seconds."""
    missing = [flag for flag in _MODEL_SIZES if flag not in given_flags(words)]
    if missing and "--use-checkpoint-args" not in words:
        raise ValueError(f"{FLAG}: no {', '.join(missing)}: give the model; the README has a complete launch line")


def shape_of_flags(flags: str) -> ModelShape:
    """Return the sizes of a model. Raises ValueError for flags that training refuses."""
    return model_of(words_of(flags)).shape


def model_of(words: Sequence[str], on_cuda: bool = True) -> Model:
    """Return the model of these flags, as hybrid data parallelism trains it.

    Args:
        words: flags of the model.
        on_cuda: whether it trains on GPUs, with TransformerEngine if the flags name it; else on CPU.

    Raises:
        ValueError: flags that hybrid data parallelism refuses.
    """
    _check_sizes(words)
    from megatron.bytescale.arguments.model_shape import model_shape  # Megatron takes seconds to import
    from megatron.bytescale.arguments.operators import operators_of
    from megatron.bytescale.arguments.optimizer import state_sizes_of
    from megatron.bytescale.arguments.options import options_of
    from megatron.bytescale.features.fp8 import Fp8Options

    args = arguments_of([*with_needed(words), "--hybrid-data-parallel"], on_cuda)
    dtype = args.params_dtype
    operators = operators_of(args, on_cuda, dtype.itemsize)
    tied, rows = not args.untie_embeddings_and_output_weights, options_of(args, Fp8Options).rows
    sizes = state_sizes_of(args, on_cuda)
    return Model(model_shape(args), operators, str(dtype).removeprefix("torch."), rows, tied, sizes)


def setup_of_model(flags: str, mesh: Sequence[str], processes: int) -> Setup:
    """Return the setup of a model that is trained with hybrid data parallelism.

    Args:
        flags: flags of the model.
        mesh: further flags of the training: ranks, sequences and micro-batches.
        processes: processes of the training.

    Raises:
        ValueError: flags that the training refuses.
    """
    words = words_of(flags)
    _check_sizes(words)
    from megatron.bytescale.arguments.setup import setup_of  # Megatron takes seconds to import

    args = arguments_of([*with_needed(words), "--hybrid-data-parallel", *mesh], processes=processes)
    args.fake_process_group = True  # the training may run on another machine
    return setup_of(args)


def arguments_of(words: Sequence[str], on_cuda: bool = True, processes: int = 1) -> argparse.Namespace:
    """Return the arguments of a training with hybrid data parallelism, checked as at its start.

    Missing arguments get default values. No file is read, except a tokenizer in a local folder, for the vocabulary.

    Args:
        words: flags of the training.
        on_cuda: whether it trains on GPUs; else on CPU.
        processes: processes of the training.

    Raises:
        ValueError: flags that the training refuses.
    """
    from megatron.bytescale.arguments.parse import check, named_or_installed, whole_parser

    with quiet(), _stand_in_for_gpu(on_cuda):
        try:
            refuse_words(words)
            args, unknown = whole_parser().parse_known_args(words)
        except (argparse.ArgumentError, ValueError) as error:
            raise ValueError(f"{FLAG}: {error}") from None
        if unknown:
            raise ValueError(f"{FLAG}: Megatron 0.19.2 knows no {unknown[0]}")
        args.rank, args.world_size = 0, processes
        _fill(args)
        try:
            check(args, words, not on_cuda, named_or_installed(words))
        except ValueError as error:
            raise Refused(*(f"{FLAG}: {reason}" for reason in reasons_of(error))) from None
    return args


@contextlib.contextmanager
def _stand_in_for_gpu(on_cuda: bool) -> Iterator[None]:
    """Install stand-ins if this machine has no GPU, because Megatron's checks ask for its properties.

    ``on_cuda``: whether the training's machine has GPUs; they count as H100s if this machine has none.
    """
    import megatron.training.arguments  # noqa: F401  # so that it binds torch's own functions
    import torch

    from megatron.bytescale.cpu import CpuStandIns

    stand_ins = CpuStandIns()
    try:
        if not torch.cuda.is_available():
            stand_ins.install_torch()
        real = torch.cuda.get_device_capability
        if on_cuda and real() < (1, 0):
            torch.cuda.get_device_capability = lambda device=None: _H100
        try:
            yield
        finally:
            torch.cuda.get_device_capability = real
    finally:
        stand_ins.uninstall()


def vocabulary_of(folder: str | None) -> int | None:
    """Return the number of words of a Hugging Face tokenizer in a local folder; None: there is none.

    Raises ValueError for a damaged tokenizer.
    """
    path = None if folder is None else Path(folder) / "tokenizer.json"
    if path is None or not path.is_file():
        return None
    from tokenizers import Tokenizer

    try:
        return int(Tokenizer.from_file(str(path)).get_vocab_size())
    except Exception as error:  # the library raises no class of its own
        raise ValueError(f"{path} is no tokenizer: {error}") from None


def _fill(args: argparse.Namespace) -> None:
    """Set the arguments that the flags of a model leave out, and clear arguments of files and tokenizers."""
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None  # as Megatron's parser does
    args.seq_length = args.seq_length or USUAL_TOKENS
    args.max_position_embeddings = args.max_position_embeddings or args.seq_length
    args.hdp_tokens_per_rank = args.hdp_tokens_per_rank or args.seq_length
    args.global_batch_size = args.global_batch_size or args.world_size
    args.lr = args.lr or 1e-4
    args.eval_interval = args.eval_interval or 1000
    if args.train_samples is None:
        args.train_iters = args.train_iters or 1
    args.vocab_size = args.vocab_size or vocabulary_of(args.tokenizer_model) or USUAL_VOCAB
    args.tokenizer_type, args.tokenizer_model = "NullTokenizer", None
    args.vocab_file = args.merge_file = None
    args.padded_vocab_size = calculate_padded_vocab_size(
        args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, logging_enabled=False
    )
    vars(args).update(dict.fromkeys(WRITTEN))
