from __future__ import annotations

from dataclasses import FrozenInstanceError
from pathlib import Path

import pytest

from bytescale_ext.config.experts import TraceTo
from bytescale_ext.plan.experts.trace import TraceHead


def test_it_is_a_value() -> None:
    target = TraceTo(Path("loads.jsonl"), TraceHead(experts=8, topk=2, ranks=4))
    assert target == TraceTo(Path("loads.jsonl"), TraceHead(8, 2, 4))
    assert target != TraceTo(Path("loads.jsonl"), TraceHead(8, 1, 4))
    with pytest.raises(FrozenInstanceError):
        target.path = Path("other")  # type: ignore[misc]
