"""An embedding in host memory trains as one process of stock Megatron does with a plain table beside the model."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.once import once
from tests.e2e.oracle import draw_weights_by_name, train_documents_one_by_one
from tests.e2e.pipelines import FULL, ONE_BY_ONE, TOLERANCE, check_gradients, run, train_and_record, whole_gradients
from tests.e2e.states.test_ngram import Case, PlainTable
from tests.e2e.training import HDP, step_losses

pytestmark = pytest.mark.ranks

UNTIED = ["--untie-embeddings-and-output-weights", "--ckpt-format", "torch_dist"]
HOST = [*HDP, *UNTIED, "--embedding-storage", "host", "--embedding-cache-rows", "0.1"]
CASES = {
    "rings-packs": Case(2, ["--hdp-tokens-per-rank", "128"]),
    "tensor-parallel": Case(
        2,
        ["--tensor-model-parallel-size", "2", "--sequence-parallel", *FULL, "--hdp-tokens-per-rank", "256"],
        tp_size=2,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_plain_table(name: str, corpus: Path, tmp_path: Path) -> None:
    case = CASES[name]
    losses, expected = once(partial(train_oracle, corpus), "embedding oracle")
    saving = ["--save-interval", 2] if case.tp_size == 1 else []
    outcomes = run(corpus, tmp_path, case.num_ranks, [*HOST, *case.flags, *saving], train_and_record)
    assert outcomes[-1].losses == pytest.approx(losses, rel=TOLERANCE), outcomes[-1].text[-500:]
    check_gradients(case, tmp_path, expected)
    assert "token ids is in host memory" in outcomes[0].text
    if saving:  # of two ranks; one goes on
        loading = [
            "--load",
            tmp_path,
            "--ckpt-step",
            2,
            "--hdp-log-dir",
            tmp_path / "then",
            "--hdp-tokens-per-rank",
            "256",
        ]
        run(corpus, None, 1, [*HOST, *loading], train_and_record)
        assert step_losses(tmp_path / "then") == pytest.approx([losses[2]], rel=TOLERANCE)


def train_oracle(corpus: Path, folder: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the first gradients of one process of stock Megatron, one document at a time."""
    (outcome,) = run(corpus, folder, 1, [*ONE_BY_ONE, *UNTIED], train_plain_embedding_one_by_one)
    return outcome.losses, whole_gradients(folder, 1, 1)[0]


class PlainEmbedding(torch.nn.Module):
    """Rows of a plain table, by token ids [b, s]."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.table = PlainTable(weight.detach().clone())

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.table.values[int(token)] for token in token_ids[0]])[None]


def train_plain_embedding_one_by_one() -> None:
    """An entry: the oracle, whose embedding is beside the model."""
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
