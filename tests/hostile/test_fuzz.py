"""Mutated files of every kind end in one line. ``FUZZ_SECONDS=3600 pytest tests/hostile/test_fuzz.py`` runs longer.

A failure names its seed; ``FUZZ_SEED=N`` begins with it.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from tests.hostile.readers import READERS, outcome
from tests.sample import is_whole

SECONDS = float(os.environ.get("FUZZ_SECONDS", 40 if is_whole() else 5))
SEED = int(os.environ.get("FUZZ_SEED", "0"))
NUMBERS = (0, 1, -1, 2**31 - 1, 2**31, 2**40, 2**63 - 1, -(2**63), 2**64)
VALUES = (*NUMBERS, 10**300, 1e308, -0.5, True, None, "", "x" * 99, "\x1b[31m", [], [[]], {}, {"a": 1}, [0] * 99)


def mutated(content: bytes, random_: random.Random) -> bytes:
    """Return a content with bytes changed, cut, repeated or replaced by extreme numbers."""
    data = bytearray(content)
    for _ in range(random_.choice((1, 1, 2, 4, 16))):
        place = random_.randrange(len(data)) if data else 0
        kind = random_.randrange(6)
        if kind == 0 and data:
            data[place] ^= 1 << random_.randrange(8)
        elif kind == 1:
            del data[place : place + random_.choice((1, 4, 8, 1 << 16))]
        elif kind == 2:
            data[place:place] = data[place : place + random_.randrange(1, 64)] * random_.choice((1, 2, 1000))
        elif kind == 3:
            data[place : place + 8] = (random_.choice(NUMBERS) % 2**64).to_bytes(8, "little")
        elif kind == 4:
            data[place : place + 4] = (random_.choice(NUMBERS) % 2**32).to_bytes(4, "little")
        else:
            data[place:place] = random_.randbytes(random_.randrange(1, 9))
    return bytes(data)


def mutated_json(value: object, random_: random.Random) -> object:
    """Return a JSON value of which one part is another value, missing, or there twice."""
    if random_.random() < 0.2 or not isinstance(value, dict | list) or not value:
        return random_.choice(VALUES)
    if isinstance(value, list):
        place = random_.randrange(len(value))
        return [*value[:place], mutated_json(value[place], random_), *value[place + random_.randrange(2) :]]
    key = random_.choice(list(value))
    if random_.random() < 0.2:
        return {name: item for name, item in value.items() if name != key}
    return {**value, key: mutated_json(value[key], random_)}


@pytest.mark.slow
def test_mutated_files(tmp_path: Path) -> None:
    deadline, seed = time.monotonic() + SECONDS, SEED
    while time.monotonic() < deadline:
        random_ = random.Random(seed)
        name = random_.choice(list(READERS))
        reader = READERS[name]
        if reader.is_json and random_.random() < 0.7:
            lines = (
                [json.loads(line) for line in reader.valid.decode().split("\n") if line]
                if name == "trace"
                else [json.loads(reader.valid)]
            )
            place = random_.randrange(len(lines))
            lines[place] = mutated_json(lines[place], random_)
            content = "\n".join(json.dumps(line) for line in lines).encode()
        else:
            content = mutated(reader.valid, random_)
        begun = time.process_time()
        try:
            message = outcome(reader, tmp_path, content)
        except Exception as error:
            raise AssertionError(f"FUZZ_SEED={seed}: {name}: {content[:200]!r}") from error
        assert "\n" not in message, f"FUZZ_SEED={seed}: {name}: {message!r}"
        assert time.process_time() - begun < 10, f"FUZZ_SEED={seed}: {name} takes long: {content[:200]!r}"
        seed += 1
    assert seed > SEED + 20
