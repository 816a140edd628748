"""``bytescale states``: what it prints, writes and draws."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.bytescale import cli
from tests.draw.png import png_size

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256"
SEVEN = ("--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --num-query-groups 8 "
         "--swiglu --vocab-size 32000")  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["states", *words]) == 0
    return capsys.readouterr().out


def test_a_7b_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--model-flags", SEVEN, "--device-memory-gb", "80")
    row = text.splitlines()[1].split()
    parameters = float(row[1].replace(",", ""))
    assert float(row[3]) == pytest.approx(12 * parameters / 1e9, rel=0.01)
    assert float(row[4]) == pytest.approx(6 * parameters / 1e9, abs=0.01)
    assert float(row[5]) == pytest.approx(18 * parameters / 1e9, abs=0.01)
    assert "80 GB of a device, 100 GB of host memory: resident " in text


def test_stages_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "--model-flags",
        SMALL,
        "--stages",
        "2",
        "--tensor-parallel",
        "2",
        "--page-mb",
        "0.01",
        "--host-memory-gb",
        "1000",
        "--json",
    )
    found = json.loads(printed(capsys, *words))
    first, last = found["stages"]
    assert last["parameters"] - first["parameters"] == 64  # the last norm; both have one of embedding and output layer
    assert first["device_bytes"] == 6 * first["parameters"]
    assert (first["fetched_bytes"], first["returned_bytes"]) == (4 * first["parameters"], 2 * first["parameters"])
    assert first["host_bytes"] > 12 * first["parameters"]
    layers, parameters = found["largest"]["paged"]
    assert layers % 2 == 0
    assert parameters > 2.9 * found["largest"]["resident"][1]


def test_a_slower_processor_takes_longer(capsys: pytest.CaptureFixture[str]) -> None:
    fast, slow = (
        json.loads(printed(capsys, "--model-flags", SMALL, "--json", "--adam-gb-per-second", rate))["stages"][0]
        for rate in ("20", "2")
    )
    assert slow["optimizer_seconds"] > 5 * fast["optimizer_seconds"]


def test_the_named_host_memory_is_the_least_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["states", "--model-flags", SEVEN, "--host-memory-gb"]
    assert cli.main([*words, "50"]) == 2
    found = re.search(r"take ([\d.]+) GB of host memory: give --host-memory-gb at least that", capsys.readouterr().err)
    assert found
    assert cli.main([*words, found[1]]) == 0
    assert cli.main([*words, f"{float(found[1]) - 0.001:.3f}"]) == 2


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed(capsys, "--model-flags", SMALL, "--float32", "--page-mb", "0.05", "--plot", str(tmp_path / "moves.png"))
    assert png_size(tmp_path / "moves.png") == (1560, 338)


def test_pages_by_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model-flags", SEVEN, "--host-memory-gb", "20", "--nvme-gb", "500"]
    text = printed(capsys, *words, "--plot", str(tmp_path / "moves.png"))
    heads, row = text.splitlines()[0], text.splitlines()[1].replace(",", "").split()
    assert heads.endswith("NVMe pages  NVMe GB written GB")
    parameters, host_pages, disk_pages = int(row[1]), int(row[2]), int(row[9])
    assert (host_pages + disk_pages) * 4 * 2**20 == pytest.approx(12 * parameters, rel=0.01)
    assert float(row[3]) == pytest.approx(20, rel=0.01)
    assert float(row[10]) == pytest.approx(24 * parameters / 1e9, rel=0.01)
    assert float(row[11]) == pytest.approx(disk_pages * 4 * 2**20 / 1e9, abs=0.01)
    assert "20 GB of host memory and 500 GB of NVMe: resident " in text
    assert "; paged with NVMe 73 layers" in text
    assert png_size(tmp_path / "moves.png") == (1560, 468)


def test_a_slower_disk_takes_longer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model-flags", SEVEN, "--host-memory-gb", "20", "--nvme-gb", "500", "--json"]
    fast, slow = (
        json.loads(printed(capsys, *words, "--nvme-write-gb-per-second", rate))["stages"][0] for rate in ("3", "0.3")
    )
    assert slow["optimizer_seconds"] > 4 * fast["optimizer_seconds"]
    assert slow["written_bytes"] == slow["pages_on_nvme"] * 4 * 2**20
    assert slow["nvme_bytes"] > 2 * slow["written_bytes"]


@pytest.mark.parametrize(("host", "flag"), [("0.05", "--host-memory-gb"), ("20", "--nvme-gb")])
def test_the_named_tier_is_the_least_that_works(host: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["states", "--model-flags", SEVEN, "--host-memory-gb", host, "--nvme-gb", "500" if host != "20" else "100"]
    assert cli.main(words) == 2
    found = re.search(rf"take ([\d.]+) GB of .*: give {flag} at least that", capsys.readouterr().err)
    assert found
    assert cli.main([*words, flag, found[1]]) == 0
    assert cli.main([*words, flag, f"{float(found[1]) - 0.001:.3f}"]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--page-mb", "0"], "--page-mb 0 must be at least 0.00390625"),
        (["--page-mb", "nan"], "--page-mb nan must be at least"),
        (["--page-mb", "big"], "invalid float value"),
        (["--stages", "3"], "3 stages do not divide the 4 layers"),
        (["--optimizer-ranks", "0"], "'0' is not a whole number"),
        (["--host-memory-gb", "-1"], "--host-memory-gb must be positive"),
        (["--adam-gb-per-second", "0"], "--adam-gb-per-second must be positive"),
        (["--link-gb-per-second", "inf"], "--link-gb-per-second must be positive"),
        (["--nvme-gb", "-1"], "--nvme-gb must be 0 or more"),
        (["--nvme-gb", "1", "--page-mb", "0.01"], "--page-mb 0.01 must be a multiple of 1/256"),
        (["--nvme-read-gb-per-second", "0"], "--nvme-read-gb-per-second must be positive"),
        (["--plot", "moves.txt"], "give a name that ends with .png"),
        (["--plot", "no/such/moves.png"], "there is no folder no/such"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["states", "--model-flags", SMALL, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
