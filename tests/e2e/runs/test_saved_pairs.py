"""Every pair of features that trains together can also be saved and resumed: to the same loss in the next step.

Sets of many features contain every pair. A pair that is refused ends with exit code 2 before anything is built. ``make
test`` runs one pair.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.covering import covering_array
from tests.e2e.corpora import VOCAB
from tests.e2e.once import once
from tests.e2e.tested import ROWS, flags_of
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, step_losses, train_in_process, train_ranks
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

STEPS = 2
LENGTH = 256  # --seq-length; the data-parallel ranks share the tokens of the longest document


@dataclass(frozen=True)
class Piece:
    """One feature of a command line.

    Attributes:
        words: flags of the feature.
        without: flags of ``MODEL`` that contradict it, each with the number of its values.
        data_ranks: least number of data-parallel ranks.
    """

    words: str = ""
    without: Mapping[str, int] | None = None
    data_ranks: int = 1


EXPERTS: Final = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none"
)
EP2: Final = f"{EXPERTS} --expert-model-parallel-size 2"
TP2: Final = "--tensor-model-parallel-size 2"
PP2: Final = "--pipeline-model-parallel-size 2"
SLICES: Final = "--seq1f1b-slices 2"
UNTIE: Final = "--untie-embeddings-and-output-weights"
SPLIT_QUERIES: Final = {"--group-query-attention": 0, "--num-query-groups": 1}

PIECES: dict[str, Piece] = {
    "tensor parallelism": Piece(TP2),
    "sharded optimizer": Piece("--use-distributed-optimizer", data_ranks=2),
    "pipelines": Piece(PP2),
    "virtual stages": Piece(f"{PP2} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    "slices": Piece(SLICES),
    "recompute": Piece("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "activation policy": Piece("--activation-policy memo --host-memory-gb 0.05 --hdp-learn-costs off"),
    "loss in chunks": Piece("--chunked-cross-entropy 32"),
    "experts": Piece(EXPERTS),
    "states in pages": Piece("--state-policy paged --state-page-mb 0.00390625 --state-host-gb 1"),
    "sequence parallelism": Piece(f"{TP2} --sequence-parallel"),
    "kept keys in slices": Piece(f"{SLICES} --hdp-kept-keys 150"),
    "zero bubble": Piece(f"{PP2} {SLICES} --seq1f1b-zero-bubble"),
    "rings over nodes": Piece(
        "--hdp-static-width 4 --hdp-ranks-per-node 2 --hdp-hierarchical-rings always", data_ranks=4
    ),
    "static context parallelism": Piece("--hdp-static-width 2", data_ranks=2),
    "bf16 or fp16": Piece("--bf16"),
    "LayerNorm, GELU, biases": Piece("--normalization LayerNorm", {"--swiglu": 0, "--disable-bias-linear": 0}),
    "learned positions, or none": Piece("--position-embedding-type learned_absolute"),
    "YaRN, or scaled rope": Piece(
        "--position-embedding-type yarn --rotary-scaling-factor 8 --yarn-original-max-position-embeddings 64"
    ),
    "q/k norm": Piece("--qk-layernorm"),
    "sliding windows": Piece("--window-size 40,0"),
    "attention sinks": Piece("--softmax-type learnable"),
    "latent attention": Piece(
        "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
        "--rope-type rope",
        SPLIT_QUERIES,
    ),
    "multi-token prediction": Piece("--mtp-num-layers 1"),
    "expert parallelism": Piece(EP2, data_ranks=2),
    "replicas of experts": Piece(f"{EP2} --moe-expert-slots 3 --moe-placement-speeds 1e-6 1000", data_ranks=2),
    "gates that start dense": Piece(f"{EXPERTS} --moe-dts-steps 4 --moe-dts-temperature 3 0.02"),
    "chats": Piece("--sft --vocab-size 383"),
    "windows of related documents": Piece("--sculpt-windows WINDOWS"),
    "batches by tokens, or that grow": Piece("--hdp-global-tokens 700"),
    "draft heads": Piece("--draft-heads clover --num-draft-heads 2 --draft-layers 1 --draft-train-trunk"),
    "n-gram memory": Piece("--ngram-layers 2 --ngram-orders 1,3 --ngram-heads 2 --ngram-rows 50 --ngram-dim 8"),
    "embedding in host memory": Piece("--host-tables embedding --table-cache-rows 0.5"),
    "evaluation": Piece("--split 60,20,20 --eval-interval 1 --eval-iters 1"),
    "tied embeddings": Piece("", {UNTIE: 0}),
}
APART: Final = {"any model", "text that Ray actors load"}
"""Rows of the table that are no feature, or have a resumption test of their own (``test_remote.py``)."""


REFUSED: Final[Mapping[str, tuple[str, ...]]] = {
    "tensor parallelism": ("experts", "expert parallelism", "replicas of experts", "gates that start dense"),
    "virtual stages": ("zero bubble", "draft heads"),
    "recompute": ("activation policy", "zero bubble"),
    "activation policy": ("zero bubble",),
    "states in pages": ("draft heads",),
    "zero bubble": ("draft heads",),
    "learned positions, or none": ("multi-token prediction",),
    "YaRN, or scaled rope": ("latent attention", "multi-token prediction"),
    "multi-token prediction": ("draft heads", "embedding in host memory"),
    "chats": ("windows of related documents", "draft heads"),
    "windows of related documents": ("batches by tokens, or that grow", "draft heads", "n-gram memory"),
    "draft heads": ("n-gram memory", "embedding in host memory"),
    "embedding in host memory": ("tied embeddings",),
}
"""Features that are refused together."""
MOST_RANKS: Final = 4
"""Ranks of a set of features, unless two of them need more."""


@cache
def are_one(pair: tuple[str, str]) -> bool:
    """Return whether two features give a flag two values, so that no command line has both."""
    one, two = (flags_of(PIECES[name].words.split()) for name in pair)
    return any(one[flag] != two[flag] for flag in one.keys() & two.keys())


def is_refused(pair: tuple[str, str]) -> bool:
    """Return whether two features, in the order of ``PIECES``, are refused together."""
    return pair[1] in REFUSED.get(pair[0], ())


def fits(names: tuple[str, ...]) -> bool:
    """Return whether features, in the order of ``PIECES``, train together on few ranks."""
    if any(are_one(pair) or is_refused(pair) for pair in itertools.combinations(names, 2)):
        return False
    return ranks_of(names) <= max(MOST_RANKS, *(ranks_of(pair) for pair in itertools.combinations(names, 2)))


@cache
def ranks_of(names: tuple[str, ...]) -> int:
    """Return the number of ranks of some features."""
    given = flags_of([word for name in names for word in PIECES[name].words.split()])
    sizes = [int(given.get(flag, ("1",))[0]) for flag in (TP2.split()[0], PP2.split()[0])]
    return sizes[0] * sizes[1] * max((PIECES[name].data_ranks for name in names), default=1)


PAIRS = [pair for pair in itertools.combinations(PIECES, 2) if not are_one(pair)]
SETS = [" + ".join(names) for names in covering_array(tuple(PIECES), fits)]
"""Sets of features: each pair that trains is in one of them. Thirteen trainings replace hundreds."""


@pytest.mark.full
@pytest.mark.parametrize("names", SETS)
def test_features_that_train_together_are_saved_and_resumed(names: str, corpus: Path, tmp_path: Path) -> None:
    outcomes = check(tuple(names.split(" + ")), corpus, tmp_path)
    assert outcomes[0].code is None, outcomes[0].text[-1000:]


@pytest.mark.parametrize("pair", ["latent attention + multi-token prediction"])
def test_a_pair_is_saved_and_resumed(pair: str, corpus: Path, tmp_path: Path) -> None:
    assert check(tuple(pair.split(" + ")), corpus, tmp_path)[0].code is None


def test_each_pair_is_in_a_set_or_refused() -> None:
    of_sets = {pair for names in SETS for pair in itertools.combinations(names.split(" + "), 2)}
    refused = {pair for pair in PAIRS if is_refused(pair)}
    assert of_sets | refused == set(PAIRS)
    assert not of_sets & refused
    assert len(refused) == sum(map(len, REFUSED.values()))


@pytest.mark.full
def test_pairs_that_are_refused_end_in_one_line(corpus: Path, tmp_path: Path) -> None:
    """A process that parses and resolves the command line of each pair, as each rank does before anything is built."""
    refused = [pair for pair in PAIRS if is_refused(pair)]
    lines = {}
    for pair in refused:
        flags, num_ranks = line_of(pair, corpus)
        lines[" + ".join(pair)] = [*map(str, flags), "--save", str(tmp_path / "save")], num_ranks
    for pair, (code, text) in run_ranks(refusals_of, 1, lines, init_group=False)[0].items():
        assert code == 2, (pair, code, text[-1000:])
        assert "Traceback" not in text
        assert "Error initializing torch.distributed" not in text, f"{pair}: nothing refuses this pair"
        assert re.search(r"^pretrain_gpt_hdp.py: error: .+\n\Z", text, re.MULTILINE), (pair, text[-1000:])
    assert not (tmp_path / "save").exists()


def refusals_of(rank: int, world: int, lines: Mapping[str, tuple[list[str], int]]) -> dict[str, tuple[object, str]]:
    """Return the exit code and the text of each command line. Each runs in a fork of this process."""
    found = {}
    for name, (flags, num_ranks) in lines.items():
        with tempfile.TemporaryFile("w+") as answer:
            child = os.fork()
            if child == 0:
                os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(num_ranks))
                outcome = train_in_process(0, num_ranks, ["pretrain_gpt_hdp.py", *flags], None)
                answer.write(json.dumps((outcome.code, outcome.text)))
                answer.flush()
                os._exit(0)
            os.waitpid(child, 0)
            answer.seek(0)
            code, text = json.loads(answer.read() or '["died", ""]')
            found[name] = code, text
    return found


@pytest.mark.full
def test_three_features_whose_checkpoint_megatron_cannot_write(corpus: Path, tmp_path: Path) -> None:
    """Megatron gives the last stage an output weight in addition to the embedding, and does not expect it in a save."""
    outcomes = check(("multi-token prediction", "tied embeddings", "pipelines"), corpus, tmp_path)
    assert outcomes[0].code is None


def test_each_feature_of_the_page_is_in_a_pair() -> None:
    assert set(ROWS) - APART == PIECES.keys() - {"tied embeddings"}


def check(names: tuple[str, ...], corpus: Path, folder: Path) -> list[Outcome]:
    """Train two steps, resume after the first, and compare; return the results of the first run."""
    flags, num_ranks = line_of(names, corpus)
    if "draft heads" in names:
        others = tuple(name for name in names if name != "draft heads")
        trunk = run(num_ranks, *line_of(others, corpus)[0], "--save", folder / "trunk")
        if trunk[0].code == 2:
            return trunk
        flags += ["--pretrained-checkpoint", folder / "trunk"]
    save = folder / "save"
    whole = run(num_ranks, *flags, "--save", save, "--save-interval", 1, "--hdp-log-dir", folder / "whole")
    if whole[0].code == 2:
        assert not save.exists(), whole[0].text[-1000:]
        assert "building GPT model" not in whole[0].text
        return whole
    assert whole[0].code is None, whole[0].text[-1000:]
    resumed = run(num_ranks, *flags, "--load", save, "--ckpt-step", 1, "--hdp-log-dir", folder / "resumed")
    assert resumed[0].code is None, resumed[0].text[-1000:]
    assert len(step_losses(folder / "whole")) == STEPS
    assert step_losses(folder / "resumed") == pytest.approx(step_losses(folder / "whole")[1:], rel=1e-6)
    return whole


def line_of(names: tuple[str, ...], corpus: Path) -> tuple[list[object], int]:
    """Return the command line of some features, and its number of ranks."""
    pieces = [PIECES[name] for name in names]
    model = without({flag: count for piece in pieces for flag, count in (piece.without or {}).items()})
    words = [word for piece in pieces for word in piece.words.split()]
    data_ranks = max((piece.data_ranks for piece in pieces), default=1)
    data = corpus
    if "chats" in names:
        from tests.e2e.hdp.test_sft import write

        data = once(write, "conversations") / "chats"
    if "windows of related documents" in names:
        from tests.e2e.hdp.test_sculpt import write_windows

        windows = once(lambda folder: write_windows(folder, corpus), "windows", str(corpus))
        words[words.index("WINDOWS")] = str(windows)
    common = ["--data-path", data, "--train-iters", STEPS, "--ckpt-format", "torch_dist"]
    layout = ["--hdp-tokens-per-rank", LENGTH // data_ranks, "--make-vocab-size-divisible-by", 128]
    return [*model, *TRAIN, *HDP, *layout, *common, *words], ranks_of(names)


def without(left_out: Mapping[str, int]) -> list[object]:
    """Return ``MODEL`` without some flags and their values."""
    words: list[object] = list(MODEL)
    for flag, count in left_out.items():
        first = words.index(flag)
        del words[first : first + 1 + count]
    assert str(VOCAB) in words
    return words


def run(num_ranks: int, *flags: object) -> list[Outcome]:
    return train_ranks(num_ranks, *flags)
