"""Pipelines in slices equal the same pipelines with whole micro-batches, in losses and every gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.e2e.corpora import write_documents
from tests.e2e.oracle import relative_error
from tests.e2e.training import MODEL, TRAIN, Outcome, train
from tests.sample import sampled

pytestmark = pytest.mark.ranks

SEQ_LENGTH = 48
LAYERS = 4
NUM_ITERATIONS = 2
TOLERANCE = 1e-5
TIED = "tied"  # placeholder of a flag: the output layer shares the weights of the embedding
Gradients = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs", lengths=(70, 9, 120, 33, 5, 200), copies=4)


class Runs:
    """Trainings on one corpus. A run without slices is made once for all comparisons."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self.corpus, self.folder = corpus, folder
        self.whole: dict[tuple[str, ...], tuple[Outcome, Gradients]] = {}

    def run(self, num_ranks: int, *flags: object) -> tuple[Outcome, Gradients]:
        """Return losses, and the gradients of the first step by file and parameter name."""
        save = self.folder / f"run{len(list(self.folder.iterdir()))}"
        model = [flag for flag in MODEL if TIED not in flags or not flag.startswith("--untie")]
        words = [*model, *TRAIN, "--seq-length", SEQ_LENGTH, "--num-layers", LAYERS, "--train-iters", NUM_ITERATIONS]
        words += ["--data-path", self.corpus, "--eod-mask-loss", "--micro-batch-size", 1]
        outcome = train(
            num_ranks, *words, "--save", save, "--save-wgrads-interval", 1, *(flag for flag in flags if flag != TIED)
        )
        assert outcome.code is None, outcome.text[-2000:]
        return outcome, read_gradients(save)

    def compare(self, num_ranks: int, flags: str, slices: str) -> Outcome:
        """Train with and without slices, compare both runs, and return the output of the run with slices."""
        key = (str(num_ranks), flags)
        if key not in self.whole:
            self.whole[key] = self.run(num_ranks, *flags.split())
        whole, whole_gradients = self.whole[key]
        outcome, gradients = self.run(num_ranks, *flags.split(), *slices.split())
        assert len(outcome.losses) == NUM_ITERATIONS
        assert outcome.losses == pytest.approx(whole.losses, rel=TOLERANCE)
        assert outcome.validation_losses == pytest.approx(whole.validation_losses, rel=TOLERANCE)
        assert gradients.keys() == whole_gradients.keys()
        assert gradients
        for name, gradient in gradients.items():
            assert relative_error(gradient, whole_gradients[name]) <= TOLERANCE, name
        return outcome


def read_gradients(save: Path, iteration: int = 1) -> Gradients:
    """Return every gradient of a step, of all stages and tensor-parallel ranks."""
    found: Gradients = {}
    for file in sorted((save / "wgrads" / f"iter_{iteration:07}").glob("mp_rank_*")):
        for chunk, of_chunk in torch.load(file, weights_only=False, map_location="cpu").items():
            found |= {f"{file.name} {chunk} {name}": gradient for name, gradient in of_chunk.items()}
    return found


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(corpus, tmp_path_factory.mktemp("runs"))


PLAIN = ((2, 2, 8), (4, 2, 6), (4, 5, 3), (1, 2, 3))  # stages, micro-batches, slices
IN_LINE = "--no-overlap-p2p-communication"


def stages(num_stages: int, num_micro_batches: int) -> str:
    return f"--pipeline-model-parallel-size {num_stages} --global-batch-size {num_micro_batches}"


@pytest.mark.parametrize(("p", "m", "k"), sampled(PLAIN, [PLAIN[0]]))
def test_slices_train_as_whole_micro_batches(p: int, m: int, k: int, runs: Runs) -> None:
    outcome = runs.compare(p, stages(p, m), f"--seq1f1b-slices {k} --seq1f1b-partition time")
    assert (
        p > 1 or "a single pipeline stage has no idle time" in outcome.text
    )  # the first rank prints it, but the last rank's output is read


@pytest.mark.parametrize(("p", "m", "k"), sampled([(4, 5, 3), (4, 1, 5)], [(4, 1, 5)]))
def test_the_eager_order(p: int, m: int, k: int, runs: Runs) -> None:
    """There are more slices, or fewer, than all stages run ahead."""
    runs.compare(p, stages(p, m), f"--seq1f1b-slices {k} --seq1f1b-eager")


@pytest.mark.parametrize(("p", "m", "k", "words"), sampled([(2, 2, 8, ""), (3, 3, 3, IN_LINE)], [(2, 2, 8, "")]))
def test_virtual_stages(p: int, m: int, k: int, words: str, runs: Runs) -> None:
    """There are as many micro-batches as stages, as Megatron's own interleaved schedule requires without slices."""
    flags = f"{stages(p, m)} --num-layers {2 * p} --num-virtual-stages-per-pipeline-rank 2"
    runs.compare(p, flags, f"--seq1f1b-slices {k} {words}")


@pytest.mark.full
def test_sequence_parallel(runs: Runs) -> None:
    """Compared with tensor parallelism alone, because Megatron's local layers do not support sequence parallelism."""
    flags = f"{stages(2, 2)} --tensor-model-parallel-size 2"
    runs.compare(4, flags, "--seq1f1b-slices 3 --sequence-parallel")


# name: (ranks, flags of both runs, partition)
FEATURES = {
    "full recompute, loss per token": (
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --calculate-per-token-loss",
        "flops",
    ),
    "recompute of the MLP, samples side by side, learned positions": (
        2,
        "--recompute-granularity selective --recompute-modules mlp core_attn --micro-batch-size 2 "
        "--global-batch-size 4 --position-embedding-type learned_absolute",
        "even",
    ),
    "tensor parallel, shared embeddings": (
        4,
        f"--tensor-model-parallel-size 2 {TIED}",
        "29,11,8",
    ),
    "distributed optimizer, loss in chunks, evaluation": (
        4,
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --chunked-cross-entropy 7 "
        "--recompute-granularity selective --eval-iters 2 --eval-interval 1 --split 60,40,0",
        "time",
    ),
}


@pytest.mark.full
@pytest.mark.parametrize("name", FEATURES)
def test_features(name: str, runs: Runs) -> None:
    num_ranks, flags, partition = FEATURES[name]
    slices = f"--seq1f1b-slices 3 --seq1f1b-partition {partition}"
    outcome = runs.compare(num_ranks, f"{stages(2, 2)} {flags}", slices)
    assert ("--eval-iters" in flags) == (len(outcome.validation_losses) >= 1)


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1,1,0] --moe-z-loss-coeff 1e-2 "
    "--moe-router-load-balancing-type seq_aux_loss aux_loss --moe-aux-loss-coeff 0.1 0.05 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05"
)
EXPERT_RANKS = {
    "one expert rank": (2, "--calculate-per-token-loss"),
    "two expert ranks, recomputed": (
        4,
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
}


@pytest.mark.parametrize("name", sampled(EXPERT_RANKS, ["one expert rank"]))
def test_experts(name: str, runs: Runs) -> None:
    """Auxiliary losses equal the losses of whole samples and micro-batches, as the gradients of routers show."""
    num_ranks, flags = EXPERT_RANKS[name]
    size = "--micro-batch-size 2 --global-batch-size 8"
    outcome = runs.compare(num_ranks, f"{stages(2, 2)} {size} {EXPERTS} {flags}", "--seq1f1b-slices 3")
    assert "load_balancing_loss" in outcome.text


def train_and_print_status() -> None:
    import pretrain_gpt_hdp
    from megatron.bytescale import status

    pretrain_gpt_hdp.main()
    print("\n".join(f"PATCH {line}" for line in status()))


def test_one_slice_is_megatron_itself(corpus: Path) -> None:
    """Runs are bitwise equal, because nothing is replaced."""
    words = [*MODEL, *TRAIN, "--seq-length", SEQ_LENGTH, "--train-iters", 2, "--data-path", corpus]
    words += [*stages(2, 2).split(), "--micro-batch-size", 1]
    whole = train(2, *words, entry=train_and_print_status)
    one = train(2, *words, "--seq1f1b-slices", 1, entry=train_and_print_status)
    assert one.losses == whole.losses
    assert len(one.losses) == 2
    for outcome in (whole, one):
        rows = [line for line in outcome.text.splitlines() if line.startswith("PATCH get_forward_backward_func")]
        assert len(rows) == 1
        assert all(" untouched " in row for row in rows)


@pytest.mark.full
def test_a_run_goes_on_with_another_number_of_slices(corpus: Path, tmp_path: Path) -> None:
    words = [*MODEL, *TRAIN, "--seq-length", SEQ_LENGTH, "--data-path", corpus, *stages(2, 2).split()]
    words += ["--micro-batch-size", 1, "--save", tmp_path, "--save-interval", 2]
    straight = train(2, *words, "--train-iters", 4, "--seq1f1b-slices", 2, "--save", tmp_path / "straight")
    train(2, *words, "--train-iters", 4, "--seq1f1b-slices", 2, "--exit-interval", 2)
    resumed = train(2, *words, "--train-iters", 4, "--seq1f1b-slices", 3, "--load", tmp_path)
    assert len(straight.losses) == 4
    assert len(resumed.losses) == 2
    third, fourth = straight.losses[2:]  # the log line of a run's second step shows the mean of its first two steps
    assert resumed.losses == pytest.approx([third, (third + fourth) / 2], rel=TOLERANCE)
