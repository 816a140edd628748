"""Forward step of documents."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.data.samples.units import units_of
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.features.hdp import build as hdp
from tests.bytescale.runtimes import runtime_of
from tests.data.sources import MemorySource
from tests.plan.simple_plans import plan_naive

LENGTHS = (40, 7, 12, 3)


class Chunk(torch.nn.Module):
    """Fake of a model chunk without experts."""

    pre_process = post_process = True
    vp_stage = None
    config = SimpleNamespace(num_moe_experts=None, hidden_dropout=0.0, moe_input_jitter_eps=None)

    def forward(self, tokens: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return tokens


@pytest.mark.parametrize("rule", [None, SliceRule(Slicing(3))])
def test_forward_passes_count_each_sequence_once_and_do_not_read_the_plan(
    monkeypatch: pytest.MonkeyPatch, rule: SliceRule | None
) -> None:
    """Host work of a step is proportional to its micro-batches, because a forward pass does not rebuild them."""
    counted: list[list[float]] = []
    monkeypatch.setattr(hdp, "update_seqlen_stats_from_cu_seqlens", lambda bounds: counted.append(bounds.tolist()))
    plan = plan_naive(LENGTHS, 2, 20)
    runtime = runtime_of()  # there is no step to read
    forward, finalize = hdp.forward_step(runtime), hdp.count_sequences(lambda: None, runtime)
    for rank in range(2):
        units = units_of(plan.ranks[rank], LENGTHS, rank, 1, rule)
        packed = [unit.read(MemorySource(LENGTHS), range(len(LENGTHS)), LENGTHS) for unit in units]
        for index, one in enumerate(packed):
            forward(iter([(index, one, None if rule is None else "prefix")]), Chunk())
        finalize()
    assert len(counted) == 2, "once per rank and step"
    lengths = [stop - start for bounds in counted for start, stop in pairwise(bounds[1:])]
    assert sorted(lengths) == sorted(LENGTHS)
