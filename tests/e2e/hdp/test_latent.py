"""Multi-latent attention trains as one process of Megatron's dense attention does: rings, packs, slices, TP 2.

Latents travel, except where their projection is recomputed by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention

from tests.e2e.once import once
from tests.e2e.oracle import draw_weights_by_name, train_documents_one_by_one
from tests.e2e.pipelines import (
    ONE_BY_ONE,
    PP2,
    TOLERANCE,
    check_gradients,
    run,
    train_and_record,
    whole_gradients,
)
from tests.e2e.training import HDP, MODEL

pytestmark = pytest.mark.ranks

GROUPS = MODEL.index("--group-query-attention")
LATENT = [
    *MODEL[:GROUPS], *MODEL[GROUPS + 3 :],
    *"--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4 "
    "--v-head-dim 6 --qk-layernorm --rope-type yarn --rotary-scaling-factor 4 "
    "--mscale 1.0 --mscale-all-dim 0.5".split(),
]  # fmt: skip
SELECTIVE = "--recompute-granularity selective --recompute-modules".split()
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel".split()


class PlainAttention(DotProductAttention):
    """Megatron's dense attention, of heads whose values have a size of their own."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


@dataclass(frozen=True)
class Case:
    """A layout, in the flags."""

    num_ranks: int
    flags: list[str] = field(default_factory=list)
    num_stages: int = 1
    tp_size: int = 1


CASES = {
    "expanded": Case(  # keys and values travel
        4, [*TP2[:2], "--hdp-tokens-per-rank", "128", *SELECTIVE, "core_attn", "mla_up_proj"], tp_size=2
    ),
    "slices": Case(
        4, [*PP2, *"--seq1f1b-slices 3 --hdp-tokens-per-rank 128".split(), *SELECTIVE, "core_attn"], num_stages=2
    ),
    "tp2": Case(4, [*TP2, "--hdp-tokens-per-rank", "128"], tp_size=2),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, corpus: Path, tmp_path: Path) -> None:
    case = CASES[name]
    losses, expected = once(partial(train_oracle, corpus), "latent")
    outcomes = run(corpus, tmp_path, case.num_ranks, [*HDP, *case.flags], train_and_record, LATENT)
    check_gradients(case, tmp_path, expected)
    assert outcomes[-1].losses == pytest.approx(losses, rel=TOLERANCE)


def train_oracle(corpus: Path, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the first gradients of one process of Megatron's layers."""
    (outcome,) = run(corpus, folder, 1, ONE_BY_ONE, train_latent_one_by_one, LATENT)
    return outcome.losses, whole_gradients(folder, 1, 1)[0]


def train_latent_one_by_one() -> None:
    """An entry: the oracle, whose dense attention takes values of their own size."""
    from megatron.training.models import gpt

    from megatron.bytescale import features
    from megatron.bytescale.core.models.gpt.gpt_layer_specs import with_core_attention

    rows = [row for row in features.refusals() if "--multi-latent-attention of local" not in row.flag]
    features.refusals = lambda: rows  # type: ignore[assignment]  # what is refused is what PlainAttention changes
    plain = gpt.default_layer_spec
    gpt.default_layer_spec = lambda *args: with_core_attention(plain(*args), PlainAttention)  # type: ignore[assignment]
    draw_weights_by_name()
    train_documents_one_by_one()
