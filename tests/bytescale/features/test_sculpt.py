"""Flags of windows: files of data sets, and refusals before anything is built."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.config.sculpt import SculptConfig
from bytescale_ext.data.corpus.windows_file import WindowsHeader, save_windows, sha256_of
from bytescale_ext.plan.sculpt.pieces import ROW
from tests.bytescale.arguments.resolving import check_refused, resolve_lines
from tests.data.sources import write_data_set
from tests.e2e.training import HDP, MODEL, TRAIN

pytestmark = pytest.mark.ranks

COMMON = [*MODEL, *TRAIN, "--micro-batch-size", "1"]
DOCUMENT = ["--sculpt-attention", "document"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write data sets a and b with windows of 256 tokens, and windows of a that are longer than a sample."""
    root = tmp_path_factory.mktemp("sculpt")
    for name, document in (("a", [1, 2, 3]), ("b", [4, 5])):
        write_data_set(root / name, [[document]])
        table = np.array([(0, 0, 0, len(document))], dtype=ROW)
        for file, context in ((name, 256), (f"{name}-long", 512)):
            header = WindowsHeader(context, "none", 1, sha256_of(root / f"{name}.idx"))
            save_windows(root / f"{file}.windows.npy", table, header)
    return root


# words after the common words ({in} is the folder), words of the refusal
REFUSED = {
    "another data set": (
        "--data-path {in}/b --sculpt-windows {in}/a.windows.npy",
        "no file of windows belongs|b: give",
    ),
    "one too many": (
        "--data-path {in}/a --sculpt-windows {in}/a.windows.npy {in}/b.windows.npy",
        "b.windows.npy: windows of a data set that is not in the data path",
    ),
    "two of one": (
        "--data-path {in}/a --sculpt-windows {in}/a.windows.npy {in}/a-long.windows.npy",
        "2 files of windows belong to the data set",
    ),
    "longer than a sample": (
        "--data-path {in}/a --sculpt-windows {in}/a-long.windows.npy",
        "windows of 512 tokens do not fit into --seq-length 256: give --seq-length 512 or more",
    ),
    "no data": ("--sculpt-windows {in}/a.windows.npy", "give the --data-path of the windows"),
    "no data set": ("--data-path {in}/none --sculpt-windows {in}/a.windows.npy", "none.idx: no such file"),
    "no windows": ("--data-path {in}/a --sculpt-windows {in}/none.windows.npy", "none.windows.json: No such file"),
    "another file": ("--data-path {in}/a --sculpt-windows {in}/a.idx", "whose name ends with .windows.npy"),
    "attention alone": ("--data-path {in}/a --sculpt-attention window", "--sculpt-attention needs --sculpt-windows"),
}
GOOD = "--data-path {in}/a --sculpt-windows {in}/a.windows.npy"


def words_of(line: str, folder: Path) -> list[str]:
    return [*COMMON, *line.replace("{in}", str(folder)).split()]


def test_windows_of_each_data_set(folder: Path) -> None:
    both = "--data-path {in}/b {in}/a --sculpt-windows {in}/a.windows.npy {in}/b.windows.npy"
    one, two, hdp = resolve_lines(
        (1, words_of(GOOD, folder)),
        (1, [*words_of(both, folder), *DOCUMENT]),
        (2, [*words_of(GOOD, folder), *HDP, "--hdp-tokens-per-rank", "128"]),
    )
    assert one.error is two.error is hdp.error is None
    a, b = (folder / f"{name}.windows.npy" for name in "ab")
    assert one.features["sculpt"] == SculptConfig({str(folder / "a"): a}, "window")
    assert two.features["sculpt"] == SculptConfig({str(folder / "b"): b, str(folder / "a"): a}, "document")
    assert [run.args["create_attention_mask_in_dataloader"] for run in (one, two, hdp)] == [False, True, False]
    assert list(hdp.features) == ["hdp", "sculpt"]


def test_what_windows_do_not_run_with(folder: Path) -> None:
    """Files of windows that do not fit are refused too."""
    lines = {
        "--mock-data": "give the --data-path",
        "--fim-data": "windows contain whole documents",
        "--reset-attention-mask": "--sculpt-attention document does this",
        "--num-experts 2": "add --hybrid-data-parallel",
        "--hybrid-data-parallel --hdp-tokens-per-rank 256 --hdp-loader ray": "use --hdp-loader local",
        "--sculpt-attention document --seq1f1b-slices 2": "add --hybrid-data-parallel",
        "--sculpt-attention document --activation-policy memo --host-memory-gb 0.1": "add --hybrid-data-parallel",
    }
    conflicts = [
        (1, [*words_of(GOOD, folder), *line.split()], f"--sculpt-windows does not work with |{message}")
        for line, message in lines.items()
    ]
    check_refused(*((1, words_of(line, folder), message) for line, message in REFUSED.values()), *conflicts)
    accepted = "--seq1f1b-slices 2", "--hybrid-data-parallel --hdp-tokens-per-rank 256 --num-experts 2"
    for one in resolve_lines(*((1, [*words_of(GOOD, folder), *line.split()]) for line in accepted)):
        assert one.error is None
