"""``bytescale states``: text, JSON and pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron.bytescale import cli

SMALL = "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --vocab-size 256"
SEVEN = ("--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 "
         "--group-query-attention --num-query-groups 8 "
         "--swiglu --vocab-size 32000")  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["states", *words]) == 0
    return capsys.readouterr().out


@pytest.mark.slow
def test_a_7b_model(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--model-flags", SEVEN, "--device-memory-gb", "80")
    row = text.splitlines()[1].split()
    parameters = float(row[1].replace(",", ""))
    assert float(row[3]) == pytest.approx(12 * parameters / 1e9, rel=0.01)
    assert float(row[4]) == pytest.approx(6 * parameters / 1e9, abs=0.01)
    assert float(row[5]) == pytest.approx(18 * parameters / 1e9, abs=0.01)
    assert "80 GB of a device, 100 GB of host memory:\n" in text


def test_stages_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--pipeline-parallel 2 --tensor-parallel 2 --page-mb 0.01 --host-memory-gb 1000 --json".split()
    found = json.loads(printed(capsys, "--model-flags", SMALL, *words))
    first, last = found["stages"]
    assert (
        last["parameters"] - first["parameters"] == 64
    )  # the last norm; both stages have the embedding or the output layer
    assert first["device_bytes"] == 6 * first["parameters"]
    assert (first["fetched_bytes"], first["returned_bytes"]) == (4 * first["parameters"], 2 * first["parameters"])
    assert first["host_bytes"] > 12 * first["parameters"]
    layers, parameters = found["largest"]["stage 1"]
    assert layers % 2 == 0
    assert parameters > 2.9 * found["largest"]["resident"][1]


@pytest.mark.full
@pytest.mark.slow
def test_late_updates_take_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Overlap with one step needs 4 bytes of gradients and 2 of results, with several 8 of gradients, in pages."""
    exact, one, four = (
        json.loads(printed(capsys, "--model-flags", SEVEN, "--host-memory-gb", "200", "--json", *words))["stages"][0]
        for words in ((), ("--update-steps", "1"), ("--update-steps", "4"))
    )
    for late, each in ((one, 6), (four, 10)):
        assert late["host_bytes"] - exact["host_bytes"] == pytest.approx(each * exact["parameters"], rel=0.01)


@pytest.mark.slow
def test_processes_of_a_node_share_gradients_and_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    """In stage 3 one process holds 6 bytes of a parameter in addition to pages. Each of 4 processes holds a quarter."""
    shared = "--optimizer-ranks 8 --state-stage 3 --host-memory-gb 200 --json".split()
    alone, four, late = (
        json.loads(printed(capsys, "--model-flags", SEVEN, *shared, *words))["stages"][0]
        for words in (
            ("--ranks-per-node", "1"), ("--ranks-per-node", "4"), ("--ranks-per-node", "4", "--update-steps", "1")
        )
    )  # fmt: skip
    assert alone["host_bytes"] - four["host_bytes"] == pytest.approx(4.5 * alone["parameters"], rel=1e-3)
    assert late["host_bytes"] - alone["host_bytes"] == pytest.approx(6 / 8 * alone["parameters"], rel=0.01)


@pytest.mark.slow
def test_pages_by_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untied = f"{SEVEN} --untie-embeddings-and-output-weights"
    words = ["--model-flags", untied, "--host-memory-gb", "20", "--nvme-gb", "500"]
    text = printed(capsys, *words, "--plot", str(tmp_path / "moves.png"))
    heads, row = text.splitlines()[0], text.splitlines()[1].replace(",", "").split()
    assert heads.endswith("NVMe pages  NVMe GB written GB")
    parameters, host_pages, disk_pages = int(row[1]), int(row[2]), int(row[9])
    assert (host_pages + disk_pages) * 4 * 2**20 == pytest.approx(12 * parameters, rel=0.01)
    assert float(row[3]) == pytest.approx(20, rel=0.01)
    assert float(row[10]) == pytest.approx(24 * parameters / 1e9, rel=0.01)
    assert float(row[11]) == pytest.approx(disk_pages * 4 * 2**20 / 1e9, abs=0.01)
    assert "20 GB of host memory and 500 GB of NVMe:\n" in text
    assert re.search(r"^stage 1 with NVMe +73 +13\.20 +3\.04  Adam's states$", text, re.MULTILINE)
    assert (tmp_path / "moves.png").exists()


@pytest.mark.full
@pytest.mark.slow
def test_a_slower_disk_takes_longer(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model-flags", SEVEN, "--host-memory-gb", "20", "--nvme-gb", "500", "--json"]
    fast, slow = (
        json.loads(printed(capsys, *words, "--nvme-write-gb-per-second", rate))["stages"][0] for rate in ("3", "0.3")
    )
    assert slow["optimizer_seconds"] > 4 * fast["optimizer_seconds"]
    assert slow["written_bytes"] == slow["pages_on_nvme"] * 4 * 2**20
    assert slow["nvme_bytes"] > 2 * slow["written_bytes"]


@pytest.mark.slow
def test_each_stage_makes_room_for_a_larger_model(capsys: pytest.CaptureFixture[str]) -> None:
    """States are in host memory, then on a disk. The device still has parameters while Megatron builds the model."""
    words = ["--model-flags", SEVEN, "--device-memory-gb", "40", "--host-memory-gb", "200", "--nvme-gb", "2000"]
    largest = json.loads(printed(capsys, *words, "--json"))["largest"]
    times = {name: parameters / largest["resident"][1] for name, (_, parameters) in largest.items()}
    assert times["stage 1"] == pytest.approx(18 / 6, rel=0.05)
    assert times["stage 2 with NVMe"] == pytest.approx(18 / 2, rel=0.1)
    assert times["stage 3 with NVMe"] == pytest.approx(18 / 2, rel=0.1)
    assert largest["stage 2"][1] == pytest.approx(200e9 / 16, rel=0.03)
    assert largest["stage 3"][1] == pytest.approx(200e9 / 18, rel=0.03)
    text = printed(capsys, *words)
    assert re.search(r"^stage 3 +\d+ +1[01]\.\d\d +\d\.\d\d  Adam's states, gradients, parameters of layers$",
                     text, re.MULTILINE)  # fmt: skip


@pytest.mark.slow
def test_a_stage_and_its_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model-flags", SEVEN, "--host-memory-gb", "200", "--json", "--micro-batches", "4", "--state-stage"]
    first, second, third = (json.loads(printed(capsys, *words, stage))["stages"][0] for stage in "123")
    parameters = first["parameters"]
    assert (first["fetched_bytes"], second["fetched_bytes"]) == (4 * parameters, 4 * 2 * parameters)
    assert second["device_bytes"] == second["build_bytes"] == third["build_bytes"] == 2 * parameters
    assert third["device_bytes"] < 0.15 * second["device_bytes"]
    wider = json.loads(printed(capsys, *words, "3", "--window-layers", "4"))["stages"][0]
    assert wider["device_bytes"] > third["device_bytes"]
    assert third["host_bytes"] - second["host_bytes"] == pytest.approx(2 * parameters)
    assert second["host_bytes"] - first["host_bytes"] == pytest.approx(4 * parameters, rel=0.01)
    assert third["returned_bytes"] == pytest.approx(2 * 2 * 4 * parameters, rel=0.1)
    assert second["optimizer_seconds"] > first["optimizer_seconds"]


@pytest.mark.parametrize(("host", "flag"), [("0.05", "--host-memory-gb"), ("20", "--nvme-gb")])
@pytest.mark.slow
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
        (["--pipeline-parallel", "3"], "3 stages do not divide the 4 layers"),
        (["--host-memory-gb", "-1"], "--host-memory-gb must be positive"),
        (["--adam-gb-per-second", "0"], "--adam-gb-per-second must be positive"),
        (["--nvme-gb", "-1"], "--nvme-gb must be 0 or more"),
        (["--nvme-gb", "1", "--page-mb", "0.01"], "--page-mb 0.01 must be a multiple of 1/256"),
    ],
)
def test_bad_input_is_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["states", "--model-flags", SMALL, *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
