"""ByteScale's Eq. 3 with corrected limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.activation.offload import OffloadLimits
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.evaluate.length_samplers import sample_lengths
from bytescale_ext.plan.evaluate.replay import replay
from bytescale_ext.plan.hdp.planner import HdpPlanner
from bytescale_ext.plan.step.check import check_step_plan
from bytescale_ext.plan.step.sizes import Cluster
from tests.sample import examples

# section 5.2 and Fig. 21: about 139 KB per token and layer in bfloat16, 25 GB/s, 400 TFLOP/s on LLaMA-7B
SECONDS = CostModel(a=32 * 2 * 4096 / 400e12, b=32 * 2 * 203e6 / 400e12)
PAPER = OffloadLimits(num_layers=32, layer_bytes_per_token=139_000, bytes_per_second=25e9, host_bytes=1e15)


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def test_a_share_of_one_needs_two_layers_of_all() -> None:
    """D(s) = 2 s / (l C) for r = 1: 16 times fewer ranks with 32 layers."""
    assert PAPER.max_tokens(floats(1e6), 8192, SECONDS)[0] == pytest.approx(16 * 8192)
    assert PAPER.min_shares(floats(16 * 8192, 8192, 100), 8192).tolist() == pytest.approx([1.0, 0.0, 0.0])


def test_the_host_holds_what_the_device_does_not() -> None:
    small = OffloadLimits(32, 139_000, 25e9, host_bytes=32 * 139_000 * 1000)
    assert small.max_tokens(floats(1e6), 8192, SECONDS)[0] == pytest.approx(9192)
    share = small.min_shares(floats(9192), 8192)[0]
    assert share * 30 * 9192 * 139_000 == pytest.approx(small.host_bytes)


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(3, 80), st.floats(1e3, 1e12), st.floats(0, 1e12), st.integers(100, 10**6), st.integers(10, 9000))
def test_what_fits_fits_by_every_limit(layers: int, speed: float, host: float, length: int, capacity: int) -> None:
    limits = OffloadLimits(layers, 1000.0, speed, host)
    most = limits.max_tokens(floats(length), capacity, SECONDS)
    share = float(limits.min_shares(most, capacity)[0])
    assert most[0] >= capacity
    assert 0 <= share <= 1
    assert share <= limits.hidden_shares(floats(length), SECONDS)[0] + 1e-9
    assert share * (layers - 2) * most[0] * 1000.0 <= host * (1 + 1e-6) + 1e-3
    assert most[0] * (2 + (1 - share) * (layers - 2)) / layers == pytest.approx(capacity)
    assert limits.min_capacity(length, int(most[0]), SECONDS) <= capacity * (1 + 1e-9)


def test_bad_limits_are_named() -> None:
    for values in ((0, 1.0, 1.0, 1.0), (2, 0.0, 1.0, 1.0), (2, 1.0, 0.0, 1.0), (2, 1.0, 1.0, -1.0)):
        with pytest.raises(ValueError, match="offload limits need"):
            OffloadLimits(*values)


@pytest.mark.parametrize(
    ("num_ranks", "capacity", "global_tokens", "least_gain"), [(1024, 2048, 16 << 20, 1.5), (512, 4096, 32 << 20, 1.1)]
)
@pytest.mark.slow
def test_offload_pays_where_rings_would_wait_for_keys(
    num_ranks: int, capacity: int, global_tokens: int, least_gain: float
) -> None:
    """For Byted with documents up to 2M tokens and a small C, rings are too wide for their exchange to overlap."""
    cost = shipped("bytescale_7b")
    stage = cost.whole()
    limits = OffloadLimits(32, cost.layer_bytes, 50e9, 100e9)
    lengths = sample_lengths("byted", 1 << 21, global_tokens, 1).tolist()
    planner = HdpPlanner(Cluster(num_ranks, capacity), (stage,))
    plan, without = replace(planner, offload=limits)(lengths), planner(lengths)
    check_step_plan(plan, lengths, num_layers=32)
    assert replay(without, stage.both).makespan >= least_gain * replay(plan, stage.both).makespan


def test_offload_holds_what_the_ranks_do_not() -> None:
    cost = shipped("bytescale_7b")
    lengths = sample_lengths("byted", 1 << 21, 8 << 20, 0).tolist()
    planner = HdpPlanner(Cluster(128, 8192), (cost.whole(),))
    with pytest.raises(ValueError, match="more than 128 ranks of 8192 tokens hold"):
        planner(lengths)
    plan = replace(planner, offload=OffloadLimits(32, cost.layer_bytes, 50e9, 100e9))(lengths)
    check_step_plan(plan, lengths, num_layers=32)
    longest = int(np.argmax(lengths))
    ranks = [shard.ring for rank in plan.ranks for one in rank for shard in one.shards if shard.seq == longest]
    assert len(ranks) <= 128 < -(-lengths[longest] // 8192)
