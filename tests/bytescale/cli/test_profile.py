"""``bytescale profile`` as a command: bad input, the report, and one short real run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bytescale_ext.measure.cost_file import read_cost, shipped
from bytescale_ext.measure.fit import Prediction
from bytescale_ext.parallel.p2p import RingComm
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale import cli
from megatron.bytescale.cli import profile
from tests.bytescale.runtimes import runtime_of
from tests.bytescale.training.test_profile import MODEL

BYTESCALE = (
    sys.executable,
    "-W",
    "ignore",
    "-c",
    "import sys; from megatron.bytescale.cli import main; sys.exit(main())",
)
ROOT = Path(__file__).resolve().parents[3]


def bytescale(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*BYTESCALE, "profile", *map(str, words)], cwd=ROOT, capture_output=True, text=True, timeout=400
    )


def test_the_flags_after_the_dashes_are_megatrons() -> None:
    words = ["profile", "--output", "cost.json", "--cpu", "--", "--num-layers", "2", "--swiglu", "--json"]
    args = cli.parser().parse_args(words)
    assert args.flags == ["--num-layers", "2", "--swiglu", "--json"]
    assert args.cpu
    assert not args.json
    assert args.max_tokens is None


def test_the_report_says_what_was_measured_and_how_well_it_predicts() -> None:
    found = [Prediction(1, (64,), 0.010, 0.011), Prediction(3, (32, 8, 8), 0.020, 0.021)]
    text = profile.report_text(shipped("bytescale_7b"), found)
    lines = [line.split() for line in text.splitlines()]
    assert ["attention,", "ps", "per", "token", "squared", "41.70", "104.25"] in lines
    assert ["linear,", "ns", "per", "token", "1,600.00", "3,200.00"] in lines
    assert ["fixed,", "us", "per", "micro-batch", "100.00", "100.00"] in lines
    assert ["bytes", "per", "token", "and", "layer", "139,000", "8,192"] in lines
    assert "32 + 2 x 8" in text
    assert "+10.0%" in text
    assert "error: median 7.5%, worst 10.0%" in text
    assert "Fig. 18a" in text


def test_the_ring_is_measured_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from bytescale_ext.measure import ring_speed

    monkeypatch.setattr(ring_speed, "bytes_per_second_of_two_processes", lambda on_cuda: 7.0)
    monkeypatch.setattr(ring_speed, "exchanged_bytes_per_second", lambda comm, device: 10.0 * comm.size)

    def subject(num_ranks: int, process: int = 0) -> Any:
        runtime = runtime_of(comm=RingComm(None, 0, num_ranks))
        return SimpleNamespace(runtime=runtime, args=SimpleNamespace(rank=process))

    assert profile.ring_rate(5e9, subject(2)) == (5e9, "as given with --ring-bytes-per-second")
    assert profile.ring_rate(None, subject(1)) == (7.0, "measured between two processes on CPU")
    assert profile.ring_rate(None, subject(1, process=1)) == (1.0, "measured by the first process")
    assert profile.ring_rate(None, subject(4, process=1)) == (40.0, "measured by 4 ranks")


def test_links_between_nodes_are_measured_by_themselves_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from bytescale_ext.measure import ring_speed

    monkeypatch.setattr(ring_speed, "exchanged_bytes_per_second", lambda comm, device: 10.0)
    monkeypatch.setattr(ring_speed, "bytes_per_second_of_nodes", lambda comm, node, device: (8.0 * node, 4.0))

    def subject(num_ranks: int, ranks_per_node: int | None) -> Any:
        runtime = runtime_of(comm=RingComm(None, 0, num_ranks))
        return SimpleNamespace(runtime=runtime, cluster=Cluster(num_ranks, 64, ranks_per_node))

    assert profile.link_rates((None, None), subject(8, 4)) == (32.0, 4.0, "measured by 8 ranks on nodes of 4")
    assert profile.link_rates((None, 5.0), subject(8, 4)) == (32.0, 5.0, "measured by 8 ranks on nodes of 4")
    for node in (None, 1, 3):  # one node, one rank in a node, part of a node
        assert profile.link_rates((None, None), subject(8, node)) == (10.0, 10.0, "measured by 8 ranks")
    assert profile.link_rates((7.0, 5.0), subject(8, 4)) == (7.0, 5.0, "as given with --ring-bytes-per-second")


@pytest.mark.ranks
@pytest.mark.full
def test_a_short_real_run(tmp_path: Path) -> None:
    """The whole command runs. Its times are too short to be reliable, and may even be refused as noise."""
    path = tmp_path / "cost.json"
    settings = ["--max-tokens", "512", "--repeats", "1", "--ring-bytes-per-second", "1e9", "--cpu", "--json"]
    done = bytescale("--output", path, *settings, "--", *MODEL)
    if done.returncode == 2:
        assert "too short or too noisy" in done.stderr
        assert done.stdout == ""
        assert not path.exists()
        return
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout)
    cost = read_cost(path)
    assert printed["cost"] == cost.to_json()
    assert cost.shape.num_layers == 8
    assert cost.recompute_bytes == 128
    assert len(printed["unseen"]) == 12
    assert all(one["measured_seconds"] > 0 and one["predicted_seconds"] > 0 for one in printed["unseen"])
