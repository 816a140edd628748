"""Mixtures of experts train like one process with one document per micro-batch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.doubles import install_deep_ep
from tests.doubles.engine import expert_name, install_engine_experts
from tests.e2e.corpora import documents, write_documents
from tests.e2e.oracle import draw_weights_by_name, relative_error, shard_of, train_documents_one_by_one
from tests.e2e.pipelines import FULL, SHARDED
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, train, train_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
NUM_EXPERTS = 4
SEED = 8
# One dense layer and one layer of experts. The enabled features do not depend on the plan: shared experts, the z loss
# (a sum over tokens) and the expert bias (which follows the loads of whole steps).
MOE = (
    f"--num-experts {NUM_EXPERTS} --moe-router-topk 2 --moe-ffn-hidden-size 24 --moe-layer-freq [0,1] "
    "--moe-token-dispatcher-type alltoall --moe-router-score-function sigmoid"
).split()
EXACT = (
    "--moe-z-loss-coeff 1e-2 --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.05 "
    "--moe-shared-expert-intermediate-size 16"
).split()
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel --hdp-tokens-per-rank 128".split()
EP2 = ["--expert-model-parallel-size", 2]
EP4 = ["--expert-model-parallel-size", 4]
FLEX = ["--moe-token-dispatcher-type", "flex", "--moe-router-dtype", "fp32"]
HYBRID = [*FLEX, "--moe-flex-dispatcher-backend", "hybridep"]
PP2 = ["--pipeline-model-parallel-size", 2, "--hdp-tokens-per-rank", 128]
SLICES = ["--seq1f1b-slices", 3]
TWO_STEPS = ["--train-iters", 2]
RECOMPUTED = ["--recompute-granularity", "selective", "--recompute-modules", "moe"]
CHOSEN_SLICES = ["--seq1f1b-slices", "auto", "--device-memory-gb", 1]
CASES: dict[str, tuple[int, list[object]]] = {
    "allgather": (4, ["--moe-token-dispatcher-type", "allgather"]),
    "zero1-overlap-recompute": (4, [*SHARDED, "--recompute-granularity", "selective", "--recompute-modules", "moe"]),
    "ep2": (4, [*EP2, *SHARDED, "--moe-shared-expert-overlap"]),
    "ep2-tp2": (4, [*EP2, *TP2, "--expert-tensor-parallel-size", 1]),  # experts are on one HDP rank
    "ep2-tp2-etp2": (4, [*EP2, *TP2, *SHARDED]),  # experts are shared by two HDP ranks
    "ep4-empty-ranks": (4, ["--expert-model-parallel-size", 4, "--hdp-tokens-per-rank", 256]),
    "ep2-pp2": (4, [*EP2, *PP2, "--overlap-grad-reduce"]),  # the first stage has no experts
    "chosen-slices-pp2": (2, [*PP2, "--hdp-tokens-per-rank", 512, *CHOSEN_SLICES, *RECOMPUTED]),
    "slices-ep2-pp2-empty-slots": (4, [*EP2, *PP2, "--hdp-tokens-per-rank", 512, *SLICES]),
    "slices-ep2-policy": (
        4,
        [*EP2, *SLICES, "--activation-policy", "memo", "--host-memory-gb", 0.05, "--hdp-learn-costs", "off"],
    ),
    "deepep-ep4": (4, [*FLEX, *EP4, "--hdp-tokens-per-rank", 256, "--moe-shared-expert-overlap"]),
    "deepep-ep2-tp2": (4, [*FLEX, *EP2, *TP2, *SHARDED, *RECOMPUTED]),
    "deepep-slices-ep2-pp2": (4, [*FLEX, *EP2, *PP2, "--hdp-tokens-per-rank", 512, *SLICES]),
    "hybridep-ep4": (4, [*HYBRID, *EP4, "--hdp-tokens-per-rank", 256]),
    "hybridep-ep2-tp2": (4, [*HYBRID, *EP2, *TP2, "--expert-tensor-parallel-size", 1]),
    "hybridep-slices-ep2-policy": (
        4,
        [*HYBRID, *EP2, *SLICES, "--activation-policy", "memo", "--host-memory-gb", 0.05, "--hdp-learn-costs", "off"],
    ),
    "engine-ep4-empty-ranks": (4, [*EP4, "--hdp-tokens-per-rank", 256]),
    "engine-ep2-tp2-etp2": (4, [*EP2, *TP2, *SHARDED]),
    "engine-deepep-slices-ep2-pp2": (4, [*FLEX, *EP2, *PP2, "--hdp-tokens-per-rank", 512, *SLICES]),
}


@dataclass(frozen=True)
class Sizes:
    """Number of ranks that share a layer, its experts and one expert, and number of pipeline stages."""

    tensor: int
    expert: int
    expert_tensor: int
    stages: int

    @classmethod
    def of(cls, flags: Sequence[object]) -> Sizes:
        given = {name: value for name, value in pairwise(flags) if str(name).endswith("-parallel-size")}
        tensor = int(str(given.get("--tensor-model-parallel-size", 1)))
        expert = int(str(given.get("--expert-model-parallel-size", 1)))
        stages = int(str(given.get("--pipeline-model-parallel-size", 1)))
        return cls(tensor, expert, int(str(given.get("--expert-tensor-parallel-size", tensor))), stages)


@pytest.fixture(scope="module")
def corpus() -> Path:
    return documents(seed=SEED)


def run(
    corpus: Path,
    save: Path,
    num_ranks: int,
    *flags: object,
    entry: Callable[[], None] | None = None,
    has_engine: bool = False,
) -> Outcome:
    common = [*MODEL, *TRAIN, *MOE, "--data-path", corpus, "--save", save,
              "--save-wgrads-interval", 1, "--make-vocab-size-divisible-by", 128 // Sizes.of(flags).tensor]  # fmt: skip
    outcome = train(num_ranks, *common, *flags, entry=partial(with_equal_weights, entry, has_engine))
    assert outcome.code is None
    return outcome


def run_oracle(
    corpus: Path, save: Path, *flags: object, entry: Callable[[], None] = train_documents_one_by_one
) -> Outcome:
    return run(corpus, save, 1, "--micro-batch-size", 1, "--calculate-per-token-loss", *flags, entry=entry)


def with_equal_weights(entry: Callable[[], None] | None, has_engine: bool = False) -> None:
    """Entry that starts from the same weights for every distribution of layers and experts, with a played DeepEP.

    ``has_engine``: experts are TransformerEngine's, which are played too.
    """
    import pretrain_gpt_hdp

    install_deep_ep()
    if has_engine:
        install_engine_experts()
    draw_weights_by_name(scale=0.25)
    (entry or pretrain_gpt_hdp.main)()


def train_and_note_margins() -> None:
    """Entry of the oracle, which prints the smallest gap between the scores of a token's second and third expert."""
    from megatron.core.transformer.moe.router import TopKRouter

    original = TopKRouter.routing

    def routing(self: Any, logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scores = logits.detach().sigmoid().view(-1, NUM_EXPERTS) + self.expert_bias
        ordered = scores.sort(-1, descending=True).values
        print(f"MARGIN {float((ordered[:, 1] - ordered[:, 2]).min())}")
        return original(self, logits, *args, **kwargs)

    TopKRouter.routing = routing
    train_documents_one_by_one()


def gradients(save: Path, sizes: Sizes) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    """Return the reduced gradients of step 1 of all stages, by (tensor-parallel rank, expert-parallel rank)."""
    found: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    for file in (save / "wgrads" / "iter_0000001").glob("mp_rank_*"):
        numbers = [int(number) for number in file.stem.split("_")[2:]]
        stage = numbers[1] if sizes.stages > 1 else 0
        of_rank = found.setdefault((numbers[0], numbers[-1] if sizes.expert > 1 else 0), {})
        for name, gradient in torch.load(file, weights_only=False, map_location="cpu")["model_chunk0"].items():
            name = expert_name(name)
            of_rank[re.sub(r"(?<!mtp\.)layers\.0", f"layers.{stage}", name) if sizes.stages > 1 else name] = gradient
    return found


@pytest.fixture(scope="module")
def oracle(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, dict[str, torch.Tensor]]:
    save = tmp_path_factory.mktemp("oracle")
    outcome = run_oracle(corpus, save, *EXACT, entry=train_and_note_margins)
    margins = [float(margin) for margin in re.findall(r"^MARGIN (.*)$", outcome.text, re.MULTILINE)]
    assert min(margins) > 5e-5, "rounding errors may choose other experts: take another SEED"
    return outcome, gradients(save, Sizes.of([]))[0, 0]


@pytest.mark.parametrize("name", sampled(CASES, ["engine-ep4-empty-ranks"]))
def test_losses_and_gradients_are_those_of_one_process(
    name: str, corpus: Path, oracle: tuple[Outcome, dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    num_ranks, flags = CASES[name]
    has_engine = name.startswith("engine")
    outcome = run(corpus, tmp_path, num_ranks, *HDP, *EXACT, *flags, *TWO_STEPS, has_engine=has_engine)
    assert outcome.losses == pytest.approx(oracle[0].losses[:2], rel=TOLERANCE)
    sizes = Sizes.of(flags)
    found = gradients(tmp_path, sizes)
    assert {tp_rank for tp_rank, _ in found} == set(range(sizes.tensor))
    assert {ep_rank for _, ep_rank in found} == set(range(sizes.expert))
    for (tp_rank, ep_rank), of_rank in found.items():
        check_gradients(of_rank, oracle[1], sizes, tp_rank, ep_rank)


def check_gradients(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], sizes: Sizes, tp_rank: int, ep_rank: int
) -> None:
    assert sum("local_experts" in key for key in found) * sizes.expert == sum(
        "local_experts" in key for key in expected
    )
    for key, value in found.items():
        if "_extra" in key:
            continue
        whole, rank, size = key, tp_rank, sizes.tensor
        if local := re.search(r"local_experts\.(\d+)", key):
            number = int(local[1]) + ep_rank * (NUM_EXPERTS // sizes.expert)
            whole = key.replace(local[0], f"local_experts.{number}")
            rank, size = tp_rank % sizes.expert_tensor, sizes.expert_tensor
        error = relative_error(value, shard_of(expected[whole], key, value, rank, size))
        assert error < TOLERANCE, f"{key}: {error=}"


@pytest.fixture(scope="module")
def lone_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No two of these documents fit in a micro-batch of 256 tokens, so each is a micro-batch, as in the oracle."""
    return write_documents(tmp_path_factory.mktemp("lone") / "docs", [256, 130, 197, 141, 255, 133, 180, 211], copies=5)


AUX = ["--moe-aux-loss-coeff", 0.1]
WHOLE = ["--hdp-balance", "none", "--hdp-tokens-per-rank", 256]  # a document that fits in one micro-batch is not split


@pytest.fixture(scope="module")
def aux_oracle(lone_documents: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, Any]:
    save = tmp_path_factory.mktemp("aux-oracle")
    return run_oracle(lone_documents, save, *AUX, *TWO_STEPS), gradients(save, Sizes.of([]))[0, 0]


AUX_CASES = {
    "ep2-zero1": [*EP2, *SHARDED],
    "slices-ep2-pp2": [*EP2, *PP2, *SLICES],
    "slices-tp2-recompute": [*TP2, *SLICES, *FULL],
}


@pytest.mark.full
@pytest.mark.parametrize("name", AUX_CASES)
def test_auxiliary_loss_is_megatrons_on_equal_micro_batches(
    name: str, lone_documents: Path, aux_oracle: tuple[Outcome, Any], tmp_path: Path
) -> None:
    flags = AUX_CASES[name]
    outcome = run(lone_documents, tmp_path, 4, *HDP, *AUX, *flags, *WHOLE, *TWO_STEPS)
    assert outcome.losses == pytest.approx(aux_oracle[0].losses, rel=TOLERANCE)
    sizes = Sizes.of(flags)
    for (tp_rank, ep_rank), found in gradients(tmp_path, sizes).items():
        check_gradients(found, aux_oracle[1], sizes, tp_rank, ep_rank)


@pytest.mark.full
def test_auxiliary_loss_changes_the_routers_gradient(aux_oracle: tuple[Outcome, Any], lone_documents: Path,
                                                     tmp_path: Path) -> None:  # fmt: skip
    run_oracle(lone_documents, tmp_path, "--train-iters", 1)
    key = next(key for key in aux_oracle[1] if key.endswith("router.weight"))
    assert relative_error(gradients(tmp_path, Sizes.of([]))[0, 0][key], aux_oracle[1][key]) > 100 * TOLERANCE


@pytest.mark.full
def test_sharded_and_resumed_where_a_stage_has_no_experts(
    corpus: Path, oracle: tuple[Outcome, Any], tmp_path: Path
) -> None:
    def part(*flags: object) -> Outcome:
        return train(4, *MODEL, *TRAIN, *MOE, "--data-path", corpus, *HDP, *EXACT, *SHARDED, *EP2, *PP2,
                     *flags, entry=partial(with_equal_weights, None))  # fmt: skip

    expected = oracle[0].losses
    begun = part("--save", tmp_path, "--exit-interval", 2)
    assert begun.losses == pytest.approx(expected[:2], rel=TOLERANCE)
    assert part("--load", tmp_path).losses == pytest.approx(expected[2:], rel=TOLERANCE)


@pytest.mark.full
def test_resumed_with_other_expert_ranks(corpus: Path, oracle: tuple[Outcome, Any], tmp_path: Path) -> None:
    def part(num_ranks: int, expert_ranks: int, *flags: object) -> list[Outcome]:
        return train_ranks(num_ranks, *MODEL, *TRAIN, *MOE, "--data-path", corpus, *HDP, *EXACT, *SHARDED,
                     "--ckpt-format", "torch_dist", *flags,
                     "--hdp-tokens-per-rank", 512 // num_ranks, "--expert-model-parallel-size", expert_ranks,
                     entry=partial(with_equal_weights, None))  # fmt: skip

    begun = part(2, 2, "--save", tmp_path, "--exit-interval", 2)[-1]
    assert begun.code == 0
    resumed = part(4, 4, "--load", tmp_path)[-1]
    assert [*begun.losses, *resumed.losses] == pytest.approx(oracle[0].losses, rel=TOLERANCE)
    refused = part(2, 1, "--load", tmp_path)[0]
    assert refused.code == 2
    assert "give 2 or more, or --no-load-optim" in refused.text
    assert "building GPT model" not in refused.text
