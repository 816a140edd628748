"""Features on one GPU: losses near the losses of a run without the feature."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.e2e.corpora import write_documents
from tests.e2e.gpu import train_on_gpu
from tests.e2e.training import HDP, MODEL, TRAIN

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.ranks,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PAGED = "--state-policy paged --state-page-mb 0.00390625 --state-host-gb 1"
FEATURES = {
    "states in pages": PAGED,
    "late updates of one step": f"{PAGED} --state-update-steps 1",
    "gradients in host memory": f"{PAGED} --state-stage 2 --use-distributed-optimizer",
    "parameters in host memory": f"{PAGED} --state-stage 3 --state-window-layers 1 --use-distributed-optimizer",
    "parameters in host memory, without the distributed optimizer": f"{PAGED} --state-stage 3",
    "loss in chunks": "--chunked-cross-entropy 32",
    "swapped activations": "--activation-policy memo --swap-fraction 0.5 --host-memory-gb 0.02",
    "swapped and recomputed activations": "--activation-policy priced --swap-fraction 0.3 --recompute-fraction 0.5 "
    "--host-memory-gb 0.02",
    "slices": "--seq1f1b-slices 3",
    "overlap of reductions and gathers": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "a timeline": "--hdp-timeline-step 2 --hdp-memory-step 2",
}
LATE = {"late updates of one step"}  # its second step computes with the parameters of the first


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("documents")
    write_documents(folder / "corpus")
    return [*MODEL, *TRAIN, *HDP, "--data-path", str(folder / "corpus"), "--bf16", "--hdp-tokens-per-rank", "256",
            "--num-layers", "4"]  # fmt: skip


def losses_of(words: list[str]) -> list[float]:
    return [float(value) for value in re.findall(r"lm loss: ([-\d.E+]+)", train_on_gpu(words))]


@pytest.fixture(scope="module")
def plain(words: list[str]) -> list[float]:
    losses = losses_of(words)
    assert len(losses) == 3
    return losses


@pytest.mark.parametrize("feature", FEATURES)
def test_losses_are_those_of_a_plain_run(feature: str, words: list[str], plain: list[float], tmp_path: Path) -> None:
    flags = FEATURES[feature].split()
    if "--hdp-timeline-step" in flags:
        flags += ["--hdp-log-dir", str(tmp_path)]
    losses = losses_of([*words, *flags])
    assert len(losses) == len(plain)
    same = 1 if feature in LATE else len(losses)
    assert losses[:same] == pytest.approx(plain[:same], rel=5e-3)
    if "--hdp-timeline-step" in flags:
        assert (tmp_path / "timeline" / "rank0.jsonl").exists()
