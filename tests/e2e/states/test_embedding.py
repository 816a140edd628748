"""An embedding in host memory trains like one process of stock Megatron with a plain table outside the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.oracle import draw_weights_by_name, train_documents_one_by_one
from tests.e2e.pipelines import FULL, TOLERANCE, Layout, check_equals, oracle_of, run, train_and_record
from tests.e2e.states.test_ngram import PlainTable
from tests.e2e.training import HDP, step_losses
from tests.sample import sampled

pytestmark = pytest.mark.ranks

UNTIED = ["--untie-embeddings-and-output-weights", "--ckpt-format", "torch_dist"]
HOST = [*HDP, *UNTIED, "--host-tables", "embedding", "--table-cache-rows", "0.1"]
CASES = {
    "rings-packs": Layout(2, ["--hdp-tokens-per-rank", "128"]),
    "tensor-parallel": Layout(
        2,
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", *FULL, "--hdp-tokens-per-rank", "256"],
        tp_size=2,
    ),
}


@pytest.mark.parametrize("name", sampled(CASES, ["rings-packs"]))
def test_losses_and_gradients_are_those_of_one_plain_table(name: str, corpus: Path, tmp_path: Path) -> None:
    expected = oracle_of(corpus, entry=train_plain_embedding_one_by_one, flags=UNTIED)
    saving = ["--save-interval", 2] if CASES[name].tp_size == 1 else []
    outcomes = check_equals(expected, corpus, tmp_path, CASES[name], [*HOST, *saving])
    assert "token ids is in host memory" in outcomes[0].text
    if saving:  # two ranks save; one rank continues
        loading = ["--load", tmp_path, "--ckpt-step", 2, "--hdp-log-dir", tmp_path / "then"]
        run(corpus, None, 1, [*HOST, *loading, "--hdp-tokens-per-rank", "256"], train_and_record)
        assert step_losses(tmp_path / "then") == pytest.approx([expected[0][2]], rel=TOLERANCE)


class PlainEmbedding(torch.nn.Module):
    """Return the rows of a plain table for token ids [b, s]."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.table = PlainTable(weight.detach().clone())

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.table.values[int(token)] for token in token_ids[0]])[None]


def train_plain_embedding_one_by_one() -> None:
    """Entry of the oracle with an embedding outside the model."""
    from megatron.training.models.gpt import GPTModelBuilder

    draw_weights_by_name()
    build_model = GPTModelBuilder.build_model

    def build_with_table(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = build_model(self, *args, **kwargs)
        embedding = model.embedding
        plain = PlainEmbedding(embedding.word_embeddings.weight)
        embedding.word_embeddings, embedding.reduce_scatter_embeddings = plain, False
        model.register_forward_pre_hook(plain.table.count, with_kwargs=True)
        return model

    GPTModelBuilder.build_model = build_with_table
    train_documents_one_by_one()
