"""The vocabulary of a model, and the rows that Megatron adds to it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


def pad_vocabulary(args: argparse.Namespace) -> None:
    """Round ``--padded-vocab-size`` up to a multiple of the tensor-parallel ranks, which share its rows equally.

    ``unpadded_vocab_size`` keeps the given number.
    """
    ranks, args.unpadded_vocab_size = args.tensor_model_parallel_size, args.padded_vocab_size
    if args.padded_vocab_size and args.padded_vocab_size % ranks:
        args.padded_vocab_size += ranks - args.padded_vocab_size % ranks


@dataclass(frozen=True)
class Vocabulary:
    """Megatron's arguments of the vocabulary, under the same names.

    Attributes:
        padded_vocab_size: number of rows of the embedding.
        unpadded_vocab_size: value of ``--padded-vocab-size``; None without the flag.
    """

    padded_vocab_size: int
    unpadded_vocab_size: int | None = None

    def num_tokens(self) -> int:
        """Return the number of tokens, without rows that belong to no token."""
        from megatron.training.global_vars import get_tokenizer  # imports torch

        return int(self.unpadded_vocab_size or get_tokenizer().vocab_size)

    def text(self) -> str:
        """Return a line about rows that belong to no token, "" if there are none."""
        tokens = self.num_tokens()
        if self.padded_vocab_size <= tokens:
            return ""
        return (
            f"> bytescale: the embedding has {self.padded_vocab_size:,} rows for {tokens:,} tokens; all rows take part "
            "in the softmax, so the loss depends on the padding, which grows with --tensor-model-parallel-size"
        )
