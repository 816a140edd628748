"""Losses of pairs: every layout has the loss and gradients of one process; bad data sets and flags are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus.sidecar import LOGPROBS, write_header
from tests.bytescale.arguments.resolving import check_refused
from tests.data.chats import random_chats, write_tokenizer
from tests.e2e.hdp.test_sft import train_with_named_weights
from tests.e2e.once import once
from tests.e2e.oracle import gradients, relative_error
from tests.e2e.pipelines import whole_gradients
from tests.e2e.training import HDP, MODEL, TRAIN, SavedRun, train_once
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

TOLERANCE = 2e-5
SIZES = [((5, 7), (5, 90)), ((150, 40), (150, 20)), ((3, 20), (3, 2)), ((60, 50), (60, 120)), ((8, 2), (8, 230)),
         ((1, 1), (1, 4)), ((80, 85), (80, 30)), ((20, 9), (20, 9))]  # fmt: skip
LAYOUTS: dict[str, tuple[int, list[object]]] = {
    "rings and idle ranks": (4, ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]),
    "pipeline in slices": (
        2, "--pipeline-model-parallel-size 2 --hdp-tokens-per-rank 256 --seq1f1b-slices 2".split()
    ),
    "tensor parallelism": (
        2, "--tensor-model-parallel-size 2 --hdp-tokens-per-rank 256 --make-vocab-size-divisible-by 64".split()
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def data() -> Path:
    """Return a folder with pairs, a data set without pairs, and log-probabilities of a reference."""
    return once(write, "pairs of answers")


def write(folder: Path) -> Path:
    run_ranks(write_pairs, 1, folder, init_group=False)
    return folder


def write_pairs(rank: int, world: int, folder: Path) -> None:
    from megatron.bytescale import cli

    write_tokenizer(folder / "tokenizer")
    sides = [random_chats([pair[side] for pair in SIZES]) for side in (0, 1)]
    sides[1] = [[*chosen[:-1], rejected[-1]] for chosen, rejected in zip(*sides, strict=True)]
    lines = [{"chosen": chosen, "rejected": rejected} for chosen, rejected in zip(*sides, strict=True)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "plain.jsonl").write_text("".join(json.dumps({"messages": line["chosen"]}) + "\n" for line in lines))
    (folder / "single.jsonl").write_text(json.dumps({"chosen": sides[0][0]}) + "\n")
    words = ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    words += ["--sft-tokenizer-prompt-format", "nemotron-nano-v2"]
    for name, more in (("pairs", ["--pairs"]), ("plain", [])):
        where = ["--from", str(folder / f"{name}.jsonl"), "--output", str(folder / name)]
        assert cli.main(["corpus", "--sft", *where, *words, *more]) == 0
    where = ["--from", str(folder / "single.jsonl"), "--output", str(folder / "single")]
    assert cli.main(["corpus", "--sft", "--pairs", *where, *words]) == 2
    answers = [chat for pair in zip(*sides, strict=True) for chat in pair]
    rollouts = [{"messages": one, "prompt": number // 4, "reward": number % 3} for number, one in enumerate(answers)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rollouts))
    (folder / "divided.jsonl").write_text("".join(json.dumps(rollouts[number]) + "\n" for number in (0, 1, 4, 5, 2)))
    for name, code in (("rollouts", 0), ("divided", 2)):
        where = ["--from", str(folder / f"{name}.jsonl"), "--output", str(folder / name)]
        assert cli.main(["corpus", "--sft", *where, *words, "--groups", "prompt", "--rewards", "reward"]) == code
    num_tokens = (folder / "pairs.bin").stat().st_size // 2
    numbers = -np.random.default_rng(4).random(num_tokens, dtype=np.float32) * 6
    numbers.tofile(folder / "reference.bin")
    write_header(str(folder / "reference"), str(folder / "pairs"), LOGPROBS, "float32")


def words_of(data: Path, loss: str, *flags: object, name: str = "pairs", reference: bool | None = None) -> list[object]:
    needs = loss[:3] in ("dpo", "ipo") if reference is None else reference
    words = ["--loss", loss, *(["--reference-logprobs", data / "reference"] if needs else [])]
    return [*MODEL, *TRAIN, *HDP, "--sft", "--data-path", data / name, "--vocab-size", 383, *words, *flags]


def run_of(data: Path, loss: str, num_ranks: int, *flags: object) -> SavedRun:
    return train_once(num_ranks, *words_of(data, loss, *flags), entry=train_with_named_weights)


CASES = [("dpo:0.2", name) for name in LAYOUTS] + [("orpo", "rings and idle ranks")]


@pytest.mark.full
@pytest.mark.parametrize(("loss", "name"), CASES)
def test_loss_and_gradients_equal_one_process(loss: str, name: str, data: Path) -> None:
    alone = run_of(data, loss, 1, "--hdp-tokens-per-rank", 1024)
    num_ranks, flags = LAYOUTS[name]
    run = run_of(data, loss, num_ranks, *flags)
    assert len(alone.losses) == 3
    assert run.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    if name != "tensor parallelism":
        wanted = gradients(alone.save)
        (found,) = whole_gradients(run.save, 2 if "pipeline" in name else 1, 1)
        for key, value in found.items():
            assert "_extra" in key or relative_error(value, wanted[key]) < TOLERANCE, key


REFUSED: dict[str, tuple[list[str], str]] = {
    "no pairs": (
        ["simpo", "--data-path", "{in}/plain"],
        "plain has no pairs of answers (|plain.groups.json: no such file|): write it with bytescale corpus --sft",
    ),
    "no reference": (["dpo"], "--loss dpo needs a path for each data set of --reference-logprobs, and 0 are given"),
    "a reference too many": (["simpo", "--reference-logprobs", "{in}/reference"], "--loss simpo needs no path of"),
    "another's reference": (
        ["dpo", "--data-path", "{in}/pairs", "--reference-logprobs", "{in}/pairs.weights"],
        "the numbers are 'weights', not log-probabilities",
    ),
    "no rollouts": (
        ["grpo:0"],
        "pairs.advantages.json: no such file, so the advantages are unknown: write the data set",
    ),
    "no policy": (
        ["grpo:0", "--data-path", "{in}/rollouts"],
        "rollouts.old.json: no such file|or of bytescale logprobs --output",
    ),
    "experts": (["simpo", "--num-experts", "4"], "--loss does not work with --num-experts with a loss of pairs"),
    "a mean over groups": (["simpo", "--loss-normalization", "groups"], "--loss-normalization with a loss of pairs"),
    "unknown": (["kto"], "--loss kto: loss 'kto' is unknown; choose one of dpo, ipo, simpo, orpo"),
    "beta": (["dpo:-1"], "--loss dpo:-1: the coefficient must be a positive number"),
}


def test_bad_pairs_are_refused(data: Path) -> None:
    cases = []
    for words, message in REFUSED.values():
        loss, *flags = (word.replace("{in}", str(data)) for word in words)
        line = words_of(data, loss, "--hdp-tokens-per-rank", 256, *flags, reference=False)
        cases.append((1, [str(word) for word in line], message))
    check_refused(*cases)


def test_a_model_that_is_its_own_reference_has_the_loss_of_a_coin(data: Path) -> None:
    """Without a reference, SimPO's loss of equal answers is the loss at its margin."""
    losses = run_of(data, "simpo:1e-6", 1, "--hdp-tokens-per-rank", 1024).losses
    assert losses == pytest.approx([math.log(2)] * 3, rel=1e-3)
