"""``bytescale ngram``: text and picture."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.bytescale import cli
from tests.data.sources import write_data_set


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    rng = np.random.default_rng(0)
    texts = [[np.minimum(rng.zipf(1.3, length), 200).tolist()] for length in (300, 50, 700, 950)]
    return write_data_set(tmp_path / "docs", texts)


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["ngram", "--rows", "4K", "--ranks", "2", "--tokens-per-rank", "100", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_row_for_each_policy_and_size(prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data", prefix, "--cache-rows", "0.1", "1", "--staleness", "5", "--plot", str(tmp_path / "hits.png"))
    lines = printed(capsys, *words).splitlines()
    assert "of 4,096 rows touched in 10 steps of 2 micro-batches of 100 tokens" in lines[0]
    assert [line.split()[:2] for line in lines[2:]] == [
        [policy, share] for policy in ("lru", "lfu", "lfuopt") for share in ("10.0%", "100.0%")
    ]
    assert (tmp_path / "hits.png").exists()


def test_as_json(prefix: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--data", prefix, "--json", "--cache-rows", "0", "1", "--policies", "lru", "--dim", "8")
    none, whole = json.loads(printed(capsys, *words))["caches"]
    assert none["num_fetched"] >= none["num_pushed"] == none["num_read"]
    rows = none["num_fetched"] + none["num_read"]
    assert none["bytes_a_step"] * 10 == rows * 9 * 4 + 2 * none["num_read"] * 16
    assert none["hit_rate"] <= 0
    assert 0 < none["waited"] == 1 - (none["num_read"] - none["num_fetched"] + none["num_staged"]) / none["num_read"]
    assert whole["waited"] < none["waited"] < 1
    assert whole["hit_rate"] > none["hit_rate"]
    assert whole["num_pushed"] == whole["num_read"] == none["num_read"]


REFUSED = [
    (["--data", "{in}/short"], "short.idx"),
    (["--orders", "0"], "--orders: invalid numbers value: '0'"),
    (["--cache-rows", "-0.1"], "--cache-rows -0.1 is not a share from 0 to 1"),
    (["--staleness", "-1"], "--staleness -1 must be at least 0"),
    (["--ranks", "50"], "2,000 tokens do not fill a step of 50 micro-batches of 100: lower --ranks"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_bad_input(
    words: list[str], message: str, prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "short.idx").write_bytes(b"MMIDIDX")
    before = sorted(tmp_path.iterdir())
    given = [word.replace("{in}", str(tmp_path)) for word in words]
    assert cli.main(["ngram", "--data", prefix, "--rows", "4K", "--tokens-per-rank", "100", *given]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("bytescale ngram: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert sorted(tmp_path.iterdir()) == before
