"""The share of attention and matrix products, from a profile."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from bytescale_ext.measure.cost_file import read_cost
from scripts.bench.cluster import products
from scripts.bench.cluster.cases import Case
from scripts.bench.cluster.speed import Bench
from scripts.cluster.ranks import Launch
from scripts.cluster.topology import Topology
from scripts.cluster.usage import Split
from tests.bench.cluster.samples import SETTING, results_of

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


def write_trace(path: Path) -> None:
    """Write a profile with 3 seconds in attention and products."""
    found = (("aten::mm", 1e6), (ATTENTION, 5e5), (f"{ATTENTION}_backward", 1.5e6), ("aten::linear", 2e6))
    events = [{"ph": "X", "cat": "cpu_op", "name": name, "ts": 0, "dur": duration} for name, duration in found]
    events += [{"ph": "X", "cat": "user_annotation", "name": "aten::mm", "dur": 9e6}, {"ph": "M", "name": "x"}]
    path.parent.mkdir(parents=True)
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events}, file)


def test_the_share_is_of_the_computing_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def split_of(topology: Topology, launch: Launch) -> Split:
        assert "--use-pytorch-profiler" in launch.command
        assert launch.command[launch.command.index("--hdp-static-width") + 1] == "8"
        assert read_cost(launch.log_dir / "cost.json").slowdown >= 1.0
        write_trace(launch.log_dir.parent / "torch_profile" / "rank-0.json.gz")
        return Split(10.0, 0.375, 0.1, 0.0, 0.525, 0.0)

    monkeypatch.setattr(products, "split_of", split_of)
    bench = Bench(tmp_path, int(SETTING["steps"]), 0)
    assert products.static_share(bench, results_of(tmp_path / "r.json"), Case("byted", 2, 4)) == pytest.approx(0.8)


@pytest.mark.parametrize(("words", "said"), [(["--case", "poems"], "give lengths"), ([], "holds no results")])
def test_bad_input_is_one_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["products.py", "--results", str(tmp_path / "none.json"), *words])
    assert products.main() == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert said in err
