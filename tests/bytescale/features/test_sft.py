"""``--sft``: its inputs, its settings, and refusals before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.config.answers import AnswerLossConfig
from bytescale_ext.data.corpus.sidecar import VALUES, WEIGHTS, weights_of, write_header
from megatron.bytescale.features.sft import SFT
from tests.bytescale.arguments.resolving import check_refused, resolve_lines
from tests.data.sources import write_data_set
from tests.e2e.training import HDP, MODEL, TRAIN

pytestmark = pytest.mark.ranks

COMMON = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", "256", "--sft"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write data sets a and b with weights, "plain" without, and "other" with the weights of a."""
    root = tmp_path_factory.mktemp("sft")
    for name in ("a", "b", "plain", "other"):
        write_data_set(root / name, [[[1, 2, 3]]] if name != "other" else [[[1], [2, 3]]])
    for name in ("a", "b"):
        path = weights_of(str(root / name))
        Path(path + VALUES).write_bytes(bytes([0, 1, 1]))
        write_header(path, str(root / name), WEIGHTS, "uint8")
    for file in root.glob("a.weights.*"):
        (root / file.name.replace("a.", "other.", 1)).write_bytes(file.read_bytes())
    return root


# words after the common words ({in} is the folder), words of the refusal
REFUSED = {
    "no mask": ("--data-path {in}/plain", "plain.weights.json: no such file, so the weights are unknown: write"),
    "another's mask": (
        "--data-path {in}/other",
        "other.weights.bin: the weights belong to another data set than |other.idx",
    ),
    "no data": ("", "no data: give the --data-path written by `bytescale corpus --sft`"),
    "windows": (
        "--data-path {in}/a --sculpt-windows {in}/a.windows.npy",
        "--sft does not work with --sculpt-windows: leave it out",
    ),
    "ray": ("--data-path {in}/a --hdp-loader ray", "--sft does not work with --hdp-loader ray: use --hdp-loader local"),
    "draft heads": (
        "--data-path {in}/a --draft-heads medusa --num-draft-heads 1 --pretrained-checkpoint {in}",
        "--sft does not work with --draft-heads: remove one of them",
    ),
}
GOOD = {
    "blend": "--data-path {in}/a {in}/b",
    "with": "--data-path {in}/a --chunked-cross-entropy 32 --hdp-global-tokens 512",
}


def words_of(line: str, folder: Path) -> list[str]:
    return [*COMMON, *line.replace("{in}", str(folder)).split()]


def test_what_is_refused_and_what_runs(folder: Path) -> None:
    stock = [*MODEL, *TRAIN, "--micro-batch-size", "1", "--sft", "--data-path", str(folder / "a")]
    refused = [(1, words_of(line, folder), message) for line, message in REFUSED.values()]
    check_refused(*refused, (1, stock, "--sft needs --hybrid-data-parallel"))
    blend, other = resolve_lines(*((1, words_of(line, folder)) for line in GOOD.values()))
    assert (blend.error, other.error) == (None, None)
    assert blend.features[SFT.name] == AnswerLossConfig((str(folder / "a"), str(folder / "b")))
    assert (blend.args["sft"], blend.args["trains_on_answers"]) == (False, True)
