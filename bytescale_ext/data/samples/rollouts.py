"""Fields of recorded rollouts: lines of a JSONL file in groups, each group the answers of a policy to one prompt.

Neighbouring lines with the same value under the group's key are a group. A reward becomes the advantage of its answer:
its distance from the group's mean reward, divided by the standard deviation of the group's rewards (Shao et al. 2024,
section 4.1.2).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import numpy as np

from bytescale_ext.data.samples.texts import LARGEST_WEIGHT

NUMBER: Final = "number"
LIST: Final = "list of numbers"
EITHER: Final = "number and no list of numbers"
SMALLEST_DEVIATION: Final = 1e-6
"""Number added to the standard deviation of rewards, so that a group of equal rewards has advantages of 0."""


@dataclass(frozen=True, slots=True)
class RolloutKeys:
    """Keys of the fields of a line.

    Attributes:
        group: key of the name of the line's group, a text or a whole number.
        rewards: key of the reward of the answer; None without rewards.
        advantages: key of the advantage of the answer, or of each of its tokens; None if it is not given.
        logprobs: key of the log-probability of each token of the answer under the policy; None if it is not given.
    """

    group: str
    rewards: str | None = None
    advantages: str | None = None
    logprobs: str | None = None


@dataclass(frozen=True, eq=False, slots=True)
class ChatDocument:
    """One document of a line.

    Attributes:
        where: ``path:line``, for messages.
        tokens: token ids: [n].
        weights: weights of the tokens' losses, 0 outside answers: [n].
        group: name of its group; None without groups.
        reward: reward of its answer; None without rewards.
        advantages: advantage of each token of the answer, else 0: float32 [n]; None without advantages.
        logprobs: log-probability of each token of the answer, else 0: float32 [n]; None if it is not given.
    """

    where: str
    tokens: np.ndarray
    weights: np.ndarray
    group: str | int | None = None
    reward: float | None = None
    advantages: np.ndarray | None = None
    logprobs: np.ndarray | None = None


def with_fields(document: ChatDocument, record: object, keys: RolloutKeys) -> ChatDocument:
    """Return a document with the fields of its line; ``record``: JSON value of the line.

    Raises:
        ValueError: a field is missing, of a wrong type, not finite, or a list of another length than the answer.
    """
    where, fields = document.where, record if isinstance(record, dict) else {}
    name = fields.get(keys.group)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise ValueError(f"{where}: no text and no whole number under the key {keys.group!r}: change --groups")
    reward = None if keys.rewards is None else float(_numbers(fields, keys.rewards, NUMBER, where)[0])
    advantages, logprobs = (
        None if key is None else _of_answer(fields, key, wanted, document)
        for key, wanted in ((keys.advantages, EITHER), (keys.logprobs, LIST))
    )
    if logprobs is not None and (logprobs > 0).any():
        raise ValueError(f"{where}: a log-probability under the key {keys.logprobs!r} is above 0")
    return replace(document, group=name, reward=reward, advantages=advantages, logprobs=logprobs)


def in_groups(documents: Iterable[ChatDocument]) -> Iterator[list[ChatDocument]]:
    """Yield the documents of each group, with advantages if they have rewards.

    Raises:
        ValueError: lines of another group divide a group, or a group of one line has a reward.
    """
    group: list[ChatDocument] = []
    finished: set[str | int | None] = set()
    for document in documents:
        if group and document.group != group[0].group:
            yield with_advantages(group)
            finished.add(group[0].group)
            group = []
        if document.group in finished:
            raise ValueError(
                f"{document.where}: lines of other groups stand between this line and its group {document.group!r}: "
                "sort the lines by group"
            )
        group.append(document)
    if group:
        yield with_advantages(group)


def with_advantages(group: Sequence[ChatDocument]) -> list[ChatDocument]:
    """Return the documents of a group with normalized rewards as advantages; without rewards, as they are.

    Raises:
        ValueError: a group of one has a reward.
    """
    if group[0].reward is None:
        return list(group)
    if len(group) == 1:
        raise ValueError(
            f"{group[0].where}: group {group[0].group!r} has one line, and a reward is compared with others of its "
            "group: leave the line out, or give --advantages"
        )
    rewards = np.array([document.reward for document in group], dtype=np.float64)
    normalized = (rewards - rewards.mean()) / (rewards.std(ddof=1) + SMALLEST_DEVIATION)
    return [
        replace(one, advantages=np.where(one.weights != 0, advantage, 0.0).astype(np.float32))
        for one, advantage in zip(group, normalized.tolist(), strict=True)
    ]


def _of_answer(fields: dict[str, object], key: str, wanted: str, document: ChatDocument) -> np.ndarray:
    """Return the number of each token of a document's answer, else 0: float32 [n]; ``wanted``: as in ``_numbers``."""
    answers = document.weights != 0
    num_tokens = int(np.count_nonzero(answers))
    numbers = _numbers(fields, key, wanted, document.where)
    if isinstance(fields[key], list) and len(numbers) != num_tokens:
        raise ValueError(
            f"{document.where}: {len(numbers)} numbers under the key {key!r}, and the answer has {num_tokens} tokens "
            "in this tokenizer, with the mark of its end"
        )
    found = np.zeros(len(answers), dtype=np.float32)
    found[answers] = numbers
    return found


def _numbers(fields: dict[str, object], key: str, wanted: str, where: str) -> np.ndarray:
    """Return the number under a key, or the list of numbers: float64 [n]; ``wanted``: which of them, in words.

    Raises ValueError for anything else.
    """
    value = fields.get(key)
    values = value if isinstance(value, list) else [value]
    is_wanted = wanted == EITHER or (wanted == LIST) == isinstance(value, list)
    if not is_wanted or not all(isinstance(one, int | float) and not isinstance(one, bool) for one in values):
        raise ValueError(f"{where}: no {wanted} under the key {key!r}: change the key or the line")
    if not all(abs(one) <= LARGEST_WEIGHT for one in cast(list[float], values)):
        raise ValueError(f"{where}: a number under the key {key!r} is above {LARGEST_WEIGHT:g} or not finite")
    return np.array(values, dtype=np.float64)
