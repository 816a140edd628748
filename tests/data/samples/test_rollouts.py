"""Fields of recorded rollouts: groups of neighbouring lines, advantages of rewards, log-probabilities; bad lines."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data.samples.rollouts import ChatDocument, RolloutKeys, in_groups, with_fields

KEYS = RolloutKeys("prompt", "score", None, "logps")
WEIGHTS = np.array([0, 0, 1, 1, 1], dtype=np.float32)


def document(line: int = 1, weights: np.ndarray = WEIGHTS) -> ChatDocument:
    return ChatDocument(f"a.jsonl:{line}", np.arange(len(weights)), weights)


def record(**fields: object) -> dict[str, Any]:
    return {"prompt": "p", "score": 1, "logps": [-0.5, -2, 0], **fields}


def test_rewards_are_compared_in_their_group() -> None:
    rewards = {"p": [1.0, 0.0, 0.0, 0.5], "q": [2.0, 2.0]}
    lines = [(name, reward) for name, group in rewards.items() for reward in group]
    read = [with_fields(document(), record(prompt=name, score=reward), KEYS) for name, reward in lines]
    groups = list(in_groups(read))
    assert [[one.group for one in group] for group in groups] == [["p"] * 4, ["q"] * 2]
    mean, deviation = statistics.mean(rewards["p"]), statistics.stdev(rewards["p"])
    for one, reward in zip(groups[0], rewards["p"], strict=True):
        assert one.advantages is not None
        assert one.advantages == pytest.approx(WEIGHTS * (reward - mean) / deviation, rel=1e-5)
        assert one.logprobs is not None
        assert one.logprobs.tolist() == [0, 0, -0.5, -2, 0]
    assert all(one.advantages is not None and not one.advantages.any() for one in groups[1])


def test_given_advantages_are_of_answers_or_of_their_tokens() -> None:
    keys = RolloutKeys("prompt", advantages="a")
    for given, wanted in ((0.25, [0, 0, 0.25, 0.25, 0.25]), ([1, -2, 3.5], [0, 0, 1, -2, 3.5])):
        found = with_fields(document(), {"prompt": 7, "a": given}, keys)
        assert found.advantages is not None
        assert found.advantages.tolist() == wanted
        assert list(in_groups([found])) == [[found]]


BAD: dict[str, tuple[dict[str, Any], RolloutKeys, str]] = {
    "no group": ({"prompt": None}, KEYS, "no text and no whole number under the key 'prompt'"),
    "no reward": ({"score": "1"}, KEYS, "no number under the key 'score'"),
    "rewards of tokens": ({"score": [1, 2, 3]}, KEYS, "no number under the key 'score'"),
    "one log-probability": ({"logps": -1}, KEYS, "no list of numbers under the key 'logps'"),
    "few log-probabilities": (
        {"logps": [-1, -1]},
        KEYS,
        "2 numbers under the key 'logps', and the answer has 3 tokens",
    ),
    "positive": ({"logps": [-1, -1, 0.5]}, KEYS, "a log-probability under the key 'logps' is above 0"),
    "not finite": ({"score": float("nan")}, KEYS, "a number under the key 'score' is above 1e"),
    "huge": ({"score": 10**400}, KEYS, "a number under the key 'score' is above 1e"),
    "text": ({"a": "b"}, RolloutKeys("prompt", advantages="a"), "no number and no list of numbers under the key 'a'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_fields_are_refused(name: str) -> None:
    fields, keys, message = BAD[name]
    with pytest.raises(ValueError, match=f"a.jsonl:1: {message}") as error:
        with_fields(document(), record(**fields), keys)
    assert "\n" not in str(error.value)


def test_groups_are_whole() -> None:
    names = ["p", "p", "q", "q", "p"]
    lines = [with_fields(document(i + 1), record(prompt=name), KEYS) for i, name in enumerate(names)]
    with pytest.raises(ValueError, match=r"a\.jsonl:5: lines of other groups stand between this line and its group"):
        list(in_groups(lines))
    with pytest.raises(ValueError, match=r"a\.jsonl:3: group 'q' has one line, and a reward is compared"):
        list(in_groups(lines[:3]))
