"""Coefficients of auxiliary losses have the same effect for every loss mask, number of ranks and number of slices.

The gradient of an auxiliary loss is the gradient of a run with the loss minus the gradient of a run without it. All
runs have the same documents and weights and differ in the tokens that are answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.e2e.corpora import write_documents
from tests.e2e.hdp.test_sft import train_with_named_weights
from tests.e2e.once import once
from tests.e2e.oracle import relative_error
from tests.e2e.pipelines import whole_gradients
from tests.e2e.training import HDP, MODEL, TRAIN, SavedRun, train_once, train_ranks

pytestmark = pytest.mark.ranks

LENGTHS = (200, 60, 40, 120, 2, 30, 90, 7)
FEW = 0.05
Z_LOSS = ("--moe-z-loss-coeff", 0.1)
AUX_LOSS = ("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", 0.1)
NO_BALANCING = ("--moe-router-load-balancing-type", "none")
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 24 --sft --train-iters 1 --clip-grad 0".split()
LAYOUTS: dict[str, tuple[int, Sequence[object]]] = {
    "one rank": (1, ("--hdp-tokens-per-rank", 1024)),
    "rings": (4, ()),
    "pipeline in slices": (
        2,
        ("--pipeline-model-parallel-size", 2, "--hdp-tokens-per-rank", 512, "--seq1f1b-slices", 2),
    ),
}
# The load balancing loss is computed per micro-batch, so it depends on the layout; the z loss does not.
CASES = [(Z_LOSS, name) for name in LAYOUTS] + [(AUX_LOSS, "one rank")]


@pytest.fixture(scope="module")
def data() -> Path:
    """Return a folder with two data sets of the same documents: all tokens are answers, or one token in twenty is."""
    return once(write, "answers of routers")


def write(folder: Path) -> Path:
    from bytescale_ext.data.corpus.sidecar import VALUES, WEIGHTS, weights_of, write_header

    for name, share in (("all", 1.0), ("few", FEW)):
        write_documents(folder / name, LENGTHS, copies=1)
        mask = np.random.default_rng(5).random(sum(LENGTHS)) < share
        mask[np.cumsum(LENGTHS) - 1] = True  # documents without an answer are left out
        path = weights_of(str(folder / name))
        mask.astype(np.uint8).tofile(path + VALUES)
        write_header(path, str(folder / name), WEIGHTS, "uint8")
    return folder


def run(data: Path, name: str, layout: str, *flags: object) -> SavedRun:
    num_ranks, ranks = LAYOUTS[layout]
    common = [*MODEL, *TRAIN, *HDP, *EXPERTS, "--data-path", data / name]
    return train_once(num_ranks, *common, *ranks, *flags, entry=train_with_named_weights)


def gradient_of_routers(data: Path, name: str, layout: str, *loss: object) -> torch.Tensor:
    """Return the gradient that a loss adds to the weights of all routers: [layers, experts, h]."""
    num_stages = 2 if "pipeline" in layout else 1
    found = []
    for flags in (loss, ()):
        balancing = () if AUX_LOSS[0] in flags else NO_BALANCING
        (whole,) = whole_gradients(run(data, name, layout, *flags, *balancing).save, num_stages, 1)
        found.append(torch.stack([whole[key].double() for key in sorted(whole) if key.endswith("router.weight")]))
    return found[0] - found[1]


@pytest.mark.full
@pytest.mark.parametrize(("loss", "layout"), CASES, ids=lambda value: value if isinstance(value, str) else value[-2])
def test_the_strength_does_not_depend_on_the_answers(loss: tuple[object, ...], layout: str, data: Path) -> None:
    expected = gradient_of_routers(data, "all", "one rank", *loss)
    assert expected.norm() > 1e-3
    assert relative_error(gradient_of_routers(data, "few", layout, *loss), expected) < 1e-3


def print_counts() -> None:
    """Entry that prints the loads that update the expert bias, [layers, experts]."""
    import importlib

    import pretrain_gpt_hdp

    module = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    update = module.get_updated_expert_bias

    def printing(counts: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        new: torch.Tensor = update(counts, *args, **kwargs)
        print(f"COUNTS {counts.dtype} {counts.sum(-1).tolist()}")
        return new

    module.get_updated_expert_bias = printing
    pretrain_gpt_hdp.main()


def test_counts_of_experts_are_exact_under_bf16(data: Path) -> None:
    """bfloat16 cannot represent all integers above 256."""
    bias = (
        "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --bf16 --hdp-tokens-per-rank 256".split()
    )
    flags = [
        *MODEL,
        *TRAIN,
        *HDP,
        *EXPERTS,
        *NO_BALANCING,
        "--data-path",
        data / "all",
        *bias,
        "--hdp-tokens-per-rank",
        256,
    ]
    outcomes = train_ranks(2, *flags, entry=print_counts)
    expected = 2.0 * sum(LENGTHS)  # each token has two experts
    assert f"COUNTS torch.float32 [{expected}, {expected}]" in outcomes[0].text, outcomes[0].text[-2000:]
