"""Model variants, precisions, evaluation and kernels equal the one-process oracle with the same flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.hdp.test_sft import train_with_named_weights
from tests.e2e.oracle import train_documents_one_by_one
from tests.e2e.training import CLASSIC_MODEL, HDP, MODEL, TRAIN, Outcome, train, train_once, train_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
ORACLE = "--micro-batch-size 1 --calculate-per-token-loss".split()
MULTI_HEAD = " ".join(MODEL).replace("--group-query-attention --num-query-groups 2 ", "").split()
TP_SP = "--tensor-model-parallel-size 2 --sequence-parallel --make-vocab-size-divisible-by 64".split()
# name: (ranks of the HDP run, model flags of both runs, flags of the HDP run)
CASES: dict[str, tuple[int, list[str], list[str]]] = {
    "layernorm-gelu-bias-tied-learned-positions": (4, CLASSIC_MODEL, [*TP_SP, "--hdp-tokens-per-rank", "128"]),
    "tied-zero1-tight-clipping": (
        4,
        [*(flag for flag in MODEL if not flag.startswith("--untie")), "--clip-grad", "0.05"],
        ["--use-distributed-optimizer"],
    ),
    "multi-head-qk-layernorm-rotary-base": (
        4,
        [*MULTI_HEAD, "--qk-layernorm", "--rotary-percent", "0.5", "--rotary-base", "100"],
        [*TP_SP, "--hdp-tokens-per-rank", "128", "--use-distributed-optimizer"],
    ),
}


@pytest.fixture(scope="module")
def plain(corpus: Path) -> Outcome:
    """Hybrid data parallelism with no other flag."""
    return with_hdp(corpus, 4)


def with_hdp(corpus: Path, num_ranks: int, *flags: object) -> Outcome:
    return train(num_ranks, *MODEL, *TRAIN, "--data-path", corpus, *HDP, *flags)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_equals_one_process(name: str, corpus: Path) -> None:
    num_ranks, model, flags = CASES[name]
    # Flags of the model come last, because later flags override earlier flags.
    common = [*TRAIN, "--train-iters", 2, "--data-path", corpus, *model]
    expected = train_once(1, *common, *ORACLE, entry=train_documents_one_by_one)
    found = train(num_ranks, *common, *HDP, *flags)
    assert len(expected.losses) == 2
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.full
def test_parameters_gather_while_ranks_wait_in_rings(tmp_path: Path) -> None:
    """Two overlapping rings are each the first micro-batch of some rank, and each parameter is gathered separately.

    A rank that is only in the second ring waits there for the other ranks. They are still in the first ring, and need
    its part of the parameters of later layers.
    """
    corpus = write_documents(tmp_path / "docs", lengths=(150, 140, 20, 10))
    flags = ["--hdp-balance", "none", "--global-batch-size", 4]
    expected = with_hdp(corpus, 4, *flags, "--use-distributed-optimizer")
    found = with_hdp(corpus, 4, *flags, *SHARDED, "--ddp-bucket-size", 100)
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.full
def test_bf16_follows_one_process(corpus: Path) -> None:
    common = [*MODEL, *TRAIN, "--data-path", corpus, "--bf16", "--init-method-std", 0.02, "--weight-decay", 0]
    expected = train_ranks(1, *common, *ORACLE, entry=train_documents_one_by_one)
    found = train_ranks(4, *common, *HDP, *SHARDED)
    for outcomes in (expected, found):
        assert "using torch.bfloat16 for parameters" in outcomes[0].text
    assert found[-1].losses == pytest.approx(expected[-1].losses, rel=5e-3)


@pytest.mark.full
def test_fp16_follows_fp32_from_the_first_step(corpus: Path) -> None:
    """No step is skipped, because the initial loss scale suits losses that are summed over tokens."""
    flags = ["--init-method-std", 0.02, "--weight-decay", 0]
    expected, found = (with_hdp(corpus, 4, *flags, *more).losses for more in ([], ["--fp16"]))
    assert len(found) == len(expected)
    assert found == pytest.approx(expected, rel=5e-3)


@pytest.mark.full
def test_bf16_learns(tmp_path: Path) -> None:
    """A small data set is repeated in each step, so its loss falls far below the loss of a random guess."""
    corpus = write_documents(tmp_path / "docs", lengths=(70, 40, 9, 3, 33, 17, 100, 12), copies=1)
    flags = ["--bf16", "--train-iters", 20, "--lr", "2e-2", "--init-method-std", 0.02, "--seq-length", 100]
    losses = train(2, *MODEL, *TRAIN, "--data-path", corpus, *HDP, *SHARDED, *flags).losses
    assert losses[-1] < 0.75 * losses[0]


FULL_RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
MEMO = "--activation-policy memo --host-memory-gb 0.05 --hdp-learn-costs off".split()
NOISE = {
    "dropout": ["--hidden-dropout", 0.3],
    "jitter": "--num-experts 4 --moe-router-topk 2 --moe-input-jitter-eps 0.5 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none --moe-ffn-hidden-size 24".split(),
}
LAYOUTS: dict[str, tuple[int, list[object]]] = {
    "rings of 4": (4, []),
    "recomputed": (4, FULL_RECOMPUTE),
    "tensor parallel": (4, [*TP_SP, "--hdp-tokens-per-rank", 128]),
    "tensor parallel, memo": (4, [*TP_SP, "--hdp-tokens-per-rank", 128, *MEMO]),
    "pipeline in slices": (2, "--pipeline-model-parallel-size 2 --hdp-tokens-per-rank 256 --seq1f1b-slices 2".split()),
}


@pytest.mark.parametrize("layout", sampled(LAYOUTS, ["pipeline in slices"]))
@pytest.mark.parametrize("noise", sampled(NOISE, ["jitter"]))
def test_noise_belongs_to_documents_so_ranks_and_layouts_do_not_change_it(
    noise: str, layout: str, corpus: Path, plain: Outcome
) -> None:
    """Each document has its masks, on one rank as in a ring; equal losses of a second step show equal gradients."""
    num_ranks, flags = LAYOUTS[layout]
    common = [*NOISE[noise], "--train-iters", 2]
    alone = train_once(1, *MODEL, *TRAIN, "--data-path", corpus, *HDP, "--hdp-tokens-per-rank", 256, *common,
                       entry=train_with_named_weights)  # fmt: skip
    many = train_once(num_ranks, *MODEL, *TRAIN, "--data-path", corpus, *HDP, *common, *flags,
                      entry=train_with_named_weights)  # fmt: skip
    assert many.losses == pytest.approx(alone.losses, rel=TOLERANCE)
    assert alone.losses[0] != alone.losses[1]
    assert alone.losses != pytest.approx(plain.losses[:2], rel=1e-3)


@pytest.mark.full
@pytest.mark.parametrize("size", [None, 12])
def test_evaluation_equals_one_process(size: int | None, corpus: Path) -> None:
    batch: list[object] = [] if size is None else ["--eval-global-batch-size", size]
    evaluate = "--split 60,20,20 --eval-interval 2 --eval-iters 2".split()
    common = [*MODEL, *TRAIN, "--data-path", corpus, *evaluate, *batch, "--train-iters", 2]
    expected = train(1, *common, *ORACLE, "--eval-micro-batch-size", 1, entry=train_documents_one_by_one)
    assert len(expected.validation_losses) == 3  # after 2 iterations, at the end, and on the test set
    found = train(4, *common, *HDP, *SHARDED)
    assert found.validation_losses == pytest.approx(expected.validation_losses, rel=TOLERANCE)
    assert found.losses == pytest.approx(expected.losses, rel=TOLERANCE)


@pytest.mark.full
def test_kernels_agree_and_the_choice_is_logged_once(corpus: Path, plain: Outcome) -> None:
    outcomes = train_ranks(4, *MODEL, *TRAIN, "--data-path", corpus, *HDP, "--hdp-attention-kernel", "reference")
    lines = [line for outcome in outcomes for line in outcome.text.splitlines() if "attention kernel" in line]
    assert len(lines) == 1
    assert lines[0].startswith("> bytescale: attention kernel reference (")
    assert outcomes[-1].losses == pytest.approx(plain.losses, rel=TOLERANCE)
