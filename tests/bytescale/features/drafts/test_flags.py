"""Flags of draft heads: their defaults, the required checkpoints, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from bytescale_ext.config.drafts import DraftConfig
from megatron.bytescale.launch import TRACKER
from tests.bytescale.arguments.resolving import check_refused, resolve_lines
from tests.e2e.training import HDP, MODEL, TRAIN

pytestmark = pytest.mark.ranks

COMMON = [*MODEL, *TRAIN, *HDP, "--data-path", "unread", "--ckpt-format", "torch_dist", "--draft-heads"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write checkpoints of a model and of a model with heads, an empty folder, and an unreadable checkpoint."""
    root = tmp_path_factory.mktemp("drafts")
    for name, tensor in (("model", "decoder.weight"), ("heads", "draft_heads.norm.weight"), ("broken", "")):
        path = root / name / "iter_0000007"
        path.mkdir(parents=True)
        if tensor:
            dcp.save({tensor: torch.zeros(3)}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
        (root / name / TRACKER).write_text("7")
    (root / "empty").mkdir()
    return root


ACCEPTED = {
    "clover --pretrained-checkpoint {in}/model": DraftConfig("clover", 5, 2, 0.7),
    "clover --pretrained-checkpoint {in}/model --load {in}/empty": DraftConfig("clover", 5, 2, 0.7),
    "medusa --load {in}/model --finetune --num-draft-heads 3": DraftConfig("medusa", 3, 0, 0.7),
    "medusa --load {in}/heads --draft-layers 1 --draft-decay 1": DraftConfig("medusa", 5, 1, 1.0),
    "clover --load {in}/heads --chunked-cross-entropy 64": DraftConfig("clover", 5, 2, 0.7),
    "clover --load {in}/heads --seq1f1b-slices 2": DraftConfig("clover", 5, 2, 0.7),
    "clover --load {in}/heads --activation-policy memo --host-memory-gb 0.1": DraftConfig("clover", 5, 2, 0.7),
    "clover --load {in}/heads --draft-train-trunk --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1": DraftConfig("clover", 5, 2, 0.7, train_trunk=True),
    "clover --load {in}/heads --draft-hidden-weight 10 --draft-train-trunk --use-distributed-optimizer "
    "--pipeline-model-parallel-size 2 --hdp-tokens-per-rank 128": DraftConfig("clover", 5, 2, 0.7, 10.0, True),
}
# words after --draft-heads ({in} is the folder): words of the refusal
REFUSED = {
    "clover": "--draft-heads needs a trained model: give its checkpoint as --pretrained-checkpoint DIR",
    "clover --load {in}/model": "has no draft heads to resume: give it as --pretrained-checkpoint",
    "clover --load {in}/empty": "there is no checkpoint, and no --pretrained-checkpoint to start from",
    "clover --load {in}/broken": "broken/iter_0000007/.metadata cannot be read",
    "clover --pretrained-checkpoint {in}/none": "none: there is no checkpoint",
    "clover --load {in}/heads --num-draft-heads 0": "--num-draft-heads 0 must be at least 1",
}
CONFLICTS = {
    "--num-experts 2 --moe-dts-steps 4": "a gate that starts dense would change a frozen model",
    "--seq1f1b-slices 2 --draft-hidden-weight 1": "the states to compare with are in the next slice",
    "--seq1f1b-slices 2 --hdp-swapped-keys 64 --host-memory-gb 0.1": "keys of heads stay on the device",
    "--seq1f1b-zero-bubble --pipeline-model-parallel-size 2": "are not split",
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": "saves no activations",
    "--state-policy paged --state-host-gb 1": "only the heads have states",
    "--sculpt-windows some.windows.npy": "train heads on documents",
    "--use-distributed-optimizer --pipeline-model-parallel-size 2": "stages of a frozen model have no states",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather": "only the heads have parameters",
    "--ckpt-format torch": "use torch_dist",
    "--num-virtual-stages-per-pipeline-rank 2": "without virtual stages",
    "--memory-plan plan.json": "the model without heads",
}


def words_of(line: str, folder: Path) -> tuple[int, list[str]]:
    return 4, [*COMMON, *line.replace("{in}", str(folder)).split()]


def test_heads_of_the_flags(folder: Path) -> None:
    found = resolve_lines(*(words_of(line, folder) for line in ACCEPTED))
    for one, wanted in zip(found, ACCEPTED.values(), strict=True):
        assert one.error is None
        assert one.features["drafts"] == wanted


def test_what_is_refused(folder: Path) -> None:
    start = "clover --pretrained-checkpoint {in}/model"
    conflicts = [
        (*words_of(f"{start} {line}", folder), f"--draft-heads does not work with |{message}")
        for line, message in CONFLICTS.items()
    ]
    stock = [*MODEL, *TRAIN, "--micro-batch-size", 1, "--draft-heads", "clover", "--load", "x"]
    check_refused(
        *((*words_of(line, folder), message) for line, message in REFUSED.items()),
        *conflicts,
        (1, stock, "--draft-heads needs --hybrid-data-parallel"),
    )
