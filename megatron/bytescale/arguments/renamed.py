"""Flags with a new spelling: the old spelling is refused with a message that names the new flag.

CHANGELOG.md has the same table. Here are all refusals of words, before anything parses them. This module imports
neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

TRAINING: Final = "training"
"""The flags of trainings, which are read on launch lines and in ``--model-flags`` of the commands."""


@dataclass(frozen=True)
class Renamed:
    """A flag with a new spelling.

    Attributes:
        old: old spelling.
        new: replacement, as named in the message and the changelog: a flag, with a word about its value if needed.
        where: ``TRAINING``, or the commands that had the option, such as ``plan, data sculpt``.
    """

    old: str
    new: str
    where: str = TRAINING


RENAMED: Final = (
    Renamed("--state-update", "--state-update-steps N, 0 for exact updates"),
    Renamed("--gpus-per-link", "--link-gb-per-second, the speed of each GPU's share"),
    Renamed("--hdp-check-plans-every", "100 in every run"),
    Renamed("--hdp-ray-server-tokens", "16777216 in every run; give --hdp-ray-servers"),
    Renamed("--no-measured-speeds", "--hdp-learn-costs off"),
    Renamed("--moe-router-dts", "--moe-dts-steps N"),
    Renamed("--moe-dts-schedule", "--moe-dts-temperature 2.0 0.3 linear"),
    Renamed("--moe-dts-max-experts", "--moe-dts-threshold S,K"),
    Renamed("--moe-placement-interval", "--moe-placement NAME,N"),
    Renamed("--moe-dts-final", "--moe-router-topk 1 --moe-router-pre-softmax for top1"),
    Renamed("--ngram-storage", "--host-tables ngram"),
    Renamed("--embedding-storage", "--host-tables embedding"),
    *(
        Renamed(f"--{table}-{old}", new)
        for table in ("ngram", "embedding")
        for old, new in (
            ("cache-rows", "--table-cache-rows"),
            ("cache-policy", "--table-cache-policy"),
            ("staleness-read", "--table-staleness R,W"),
            ("staleness-write", "--table-staleness R,W"),
            ("staleness-warmup", "--table-staleness R,W,STEPS"),
            ("lr", "--table-lr"),
        )
    ),
    Renamed("--gpus", "--ranks", "search"),
    Renamed("--gpus-per-node", "--ranks-per-node", "search"),
    Renamed("--world-size", "--ranks", "dry-run"),
    Renamed("--workers", "--ranks", "ngram"),
    Renamed("--workers", "--concurrent-tasks", "data clean"),
    Renamed("--microbatches", "--micro-batches", "schedule, states"),
    Renamed("--context", "--seq-length", "data sculpt, search, simulate, states"),
    Renamed("--tp", "--tensor-parallel", "schedule"),
    Renamed("--stages", "--pipeline-parallel", "plan, schedule, simulate, states"),
    Renamed("--policy", "--activation-policy", "activations"),
    Renamed("--gpus-per-link", "--link-gb-per-second", "activations"),
    Renamed("--output-prefix", "--output", "data sculpt"),
    Renamed("--launch", "--launcher", "search"),
    Renamed("--link-gb-per-second", "--exchange-gb-per-second", "experts"),
)


def refuse_words(words: Iterable[str], where: str = TRAINING) -> None:
    """Raise ValueError if a command line contains an old spelling, or a flag that would replace all others.

    ``where``: ``TRAINING`` or one command.
    """
    replacements = {row.old: row.new for row in RENAMED if where in row.where.split(", ")}
    for word in words:
        flag = word.split("=")[0]
        if where == TRAINING and flag == "--yaml-cfg":  # it would replace our flags too
            raise ValueError("--yaml-cfg does not work here: give the flags on the command line")
        if flag in replacements:
            raise ValueError(f"{flag} is now {replacements[flag]}")
