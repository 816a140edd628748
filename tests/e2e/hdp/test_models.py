"""Attention, positions and multi-token prediction of today's models train like one process of stock Megatron.

Each model runs in rings and packs, in slices, or with tensor parallelism.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.dot_product_attention import DotProductAttention

from tests.e2e.oracle import draw_weights_by_name, gradients, relative_error, train_documents_one_by_one
from tests.e2e.pipelines import FULL, PP2, TOLERANCE, Layout, check_equals, oracle_of, train_one_by_one
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, train_once

pytestmark = [pytest.mark.ranks, pytest.mark.full]

GROUPS = MODEL.index("--group-query-attention")
MODELS = {
    "partial-scaled-rope": [
        *MODEL,
        *"--rotary-percent 0.5 --rotary-interleaved --rotary-base 500000 --use-rope-scaling".split(),
        *"--rope-scaling-factor 4 --no-rope-freq 2 --qk-layernorm".split(),
    ],
    "yarn-windows-sinks": [
        *MODEL,
        *"--position-embedding-type yarn --rotary-scaling-factor 8 --yarn-original-max-position-embeddings 64".split(),
        *"--softmax-type learnable --window-size 24,0 --window-attn-skip-freq 2".split(),
    ],
    "windows": [*MODEL, *"--window-size 40,0 --window-attn-skip-freq [1,1,0,1] --softmax-type off-by-one".split()],
    "latent": [  # latents travel, unless their projection alone is recomputed
        *MODEL[:GROUPS],
        *MODEL[GROUPS + 3 :],
        *"--multi-latent-attention --q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 4".split(),
        *"--v-head-dim 6 --qk-layernorm --rope-type yarn --rotary-scaling-factor 4 --mscale 1.0".split(),
        *"--mscale-all-dim 0.5".split(),
    ],
    "multi-token": [*MODEL, *"--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5".split()],
    "repeated": [*MODEL, *"--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 --mtp-use-repeated-layer".split()],
}
TP2 = "--tensor-model-parallel-size 2 --hdp-tokens-per-rank 128".split()
SLICES = [*PP2, *"--seq1f1b-slices 3 --hdp-tokens-per-rank 128".split()]
UNEVEN_LAYOUT = [*PP2, *"--pipeline-model-parallel-layout Ettt|tmmL --hdp-tokens-per-rank 128".split()]
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn".split()
CASES: dict[str, tuple[str, Layout]] = {
    "partial-scaled-rope-slices": ("partial-scaled-rope", Layout(4, SLICES, num_stages=2)),
    "yarn-windows-sinks-tp2": ("yarn-windows-sinks", Layout(4, [*TP2, "--sequence-parallel"], tp_size=2)),
    "yarn-windows-sinks-rings": ("yarn-windows-sinks", Layout(4)),
    "windows-slices": ("windows", Layout(4, [*SLICES, "--hdp-kept-keys", "200"], num_stages=2)),
    "latent-expanded-tp2": ("latent", Layout(4, [*TP2, *SELECTIVE, "mla_up_proj"], tp_size=2)),
    "latent-slices": ("latent", Layout(4, [*SLICES, *SELECTIVE], num_stages=2)),
    "latent-tp2": ("latent", Layout(4, [*TP2, "--sequence-parallel"], tp_size=2)),
    "multi-token-rings": ("multi-token", Layout(4, ["--chunked-cross-entropy", "24"])),
    "multi-token-slices": ("multi-token", Layout(4, SLICES, num_stages=2)),
    "multi-token-tp2": ("multi-token", Layout(4, [*TP2, *FULL], tp_size=2)),
    "multi-token-tp2-sequence-parallel": ("multi-token", Layout(4, [*TP2, "--sequence-parallel"], tp_size=2)),
    "repeated-slices": ("repeated", Layout(4, SLICES, num_stages=2)),
    "multi-token-layout": ("multi-token", Layout(4, UNEVEN_LAYOUT, num_stages=2)),
    "multi-token-zero-bubble": ("multi-token", Layout(4, [*SLICES, "--seq1f1b-zero-bubble"], num_stages=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, corpus: Path, tmp_path: Path) -> None:
    kind, layout = CASES[name]
    model, entry = MODELS[kind], train_latent_one_by_one if kind == "latent" else train_one_by_one
    expected = oracle_of(corpus, model, entry)
    assert expected[0] != pytest.approx(oracle_of(corpus)[0], rel=10 * TOLERANCE)
    outcomes = check_equals(expected, corpus, tmp_path, layout, HDP, model=model)
    if kind == "multi-token":
        assert any("mtp.layers.1.mtp_model_layer" in parameter for parameter in expected[1])
        for depth in (1, 2):  # random tokens: about the logarithm of the vocabulary
            assert all(3 < loss < 7 for loss in depth_losses(outcomes[-1], depth))
            assert len(depth_losses(outcomes[-1], depth)) == len(expected[0])


def test_depths_have_means_over_documents(corpus: Path) -> None:
    """Gradients of Megatron without ``--calculate-per-token-loss`` are means over micro-batches, here documents."""
    common = [*MODELS["multi-token"], *TRAIN, "--data-path", corpus]
    expected = train_once(1, *common, "--micro-batch-size", 1, entry=train_documents_one_by_one)
    flags = [*HDP, "--hdp-tokens-per-rank", 128, "--loss-normalization", "documents"]
    found = train_once(2, *common, *flags)
    wanted = gradients(expected.save)
    for key, value in gradients(found.save).items():
        assert "_extra" in key or relative_error(value, wanted[key]) < TOLERANCE, key


def depth_losses(outcome: Outcome, depth: int) -> list[float]:
    return [float(value) for value in re.findall(rf"\| mtp_{depth} loss: ([-\d.E+]+)", outcome.text)]


class PlainAttention(DotProductAttention):
    """Megatron's dense attention for heads with a different size of values."""

    def __init__(self, *args: Any, k_channels: int = 0, v_channels: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition


def train_latent_one_by_one() -> None:
    """Run the oracle with dense attention for a different size of values (``entry``)."""
    from megatron.training.models import gpt

    from megatron.bytescale import features
    from megatron.bytescale.core.models.gpt.gpt_layer_specs import with_core_attention

    rows = [row for row in features.refusals() if "--multi-latent-attention of local" not in row.flag]
    features.refusals = lambda: rows  # type: ignore[assignment]  # what is refused is what PlainAttention changes
    plain = gpt.default_layer_spec
    gpt.default_layer_spec = lambda *args: with_core_attention(plain(*args), PlainAttention)  # type: ignore[assignment]
    draw_weights_by_name()
    train_documents_one_by_one()
