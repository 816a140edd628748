"""Models with n-gram memory train like one process of stock Megatron with a simple memory of its own."""

from __future__ import annotations

import importlib
import os
import signal
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from bytescale_ext.config.memory.tables import NgramConfig
from bytescale_ext.data.samples.grams import GramRule
from tests.e2e.oracle import draw_weights_by_name, train_documents_one_by_one
from tests.e2e.pipelines import (
    FULL,
    PP2,
    TOLERANCE,
    Layout,
    check_equals,
    oracle_of,
    run,
    train_and_record,
)
from tests.e2e.pipelines import LAYERS as LAYER_FLAGS
from tests.e2e.training import HDP, MODEL, TRAIN, step_losses, train_to_failure

pytestmark = pytest.mark.ranks

LAYERS, ROWS, DIM = (2, 3), 50, 8  # so few rows that n-grams share them
NGRAM = "--ngram-layers 2,3 --ngram-orders 1,3 --ngram-heads 2 --ngram-rows 50 --ngram-dim 8".split()
RULE = GramRule((1, 3), 2, ROWS)
SLICES = [*PP2, "--seq1f1b-slices", "3", "--hdp-tokens-per-rank", "128"]
TP2 = ["--tensor-model-parallel-size", "2", "--sequence-parallel", *FULL, "--hdp-tokens-per-rank", "256"]
POLICY = "--swap-fraction 0.3 --recompute-fraction 0.3 --host-memory-gb 0.1".split()
CASES = {
    "stages-slices-pages": Layout(
        2, ["--state-policy", "paged", *SLICES, "--hdp-tokens-per-rank", "256"], num_stages=2
    ),
    "tensor-parallel-recompute": Layout(2, TP2, tp_size=2),
}
LATER = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5".split()
HOST = ["--host-tables", "ngram", "--table-cache-rows"]
HOST_CASES = {
    "rings-packs-policy": Layout(2, [*HOST, "0.3", "--hdp-tokens-per-rank", "128", *POLICY]),
    "rings-stages-slices": Layout(4, [*HOST, "0.1", "--table-cache-policy", "lfuopt", *SLICES], num_stages=2),
    "tensor-parallel-recompute": Layout(2, [*HOST, "1", "--table-cache-policy", "lfu", *TP2], tp_size=2),
}
HOST_RUN = [*NGRAM, "--ckpt-format", "torch_dist"]


@pytest.mark.full
@pytest.mark.parametrize("name", HOST_CASES)
def test_tables_on_the_host_train_as_one_plain_table(name: str, corpus: Path, tmp_path: Path) -> None:
    expected = oracle_of(corpus, entry=train_plain_table_one_by_one)
    check_equals(expected, corpus, tmp_path, HOST_CASES[name], [*HDP, *HOST_RUN], entry=train_with_drawn_memory)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_those_of_one_process(name: str, corpus: Path, tmp_path: Path) -> None:
    expected = oracle_of(corpus, entry=train_plain_memory_one_by_one)
    outcomes = check_equals(expected, corpus, tmp_path, CASES[name], [*HDP, *NGRAM], entry=train_with_drawn_memory)
    assert "n-gram memory of 2,448 parameters in each of the layers 2, 3" in outcomes[0].text


@pytest.mark.full
def test_memories_are_below_layers_of_later_tokens(corpus: Path, tmp_path: Path) -> None:
    model = [*MODEL, *LATER]
    expected = oracle_of(corpus, model, train_plain_memory_one_by_one)
    given = {"entry": train_with_drawn_memory, "model": model}
    check_equals(
        expected,
        corpus,
        tmp_path,
        Layout(2, [*SLICES, "--hdp-tokens-per-rank", "256"], num_stages=2),
        [*HDP, *NGRAM],
        **given,
    )


def test_tables_of_two_ranks_go_on_with_one(corpus: Path, tmp_path: Path) -> None:
    """Ranks with delayed updates in their caches save after one step and are killed in the next. One rank continues."""
    losses, _ = oracle_of(corpus, entry=train_plain_table_one_by_one)
    sharded = [*HOST_RUN, "--use-distributed-optimizer", "--hdp-tokens-per-rank", 256]
    saving = [*HOST, "1", "--table-staleness", "0,9,0", "--save", tmp_path, "--save-interval", 1]
    model = [*MODEL, *TRAIN, *LAYER_FLAGS, "--data-path", corpus, "--make-vocab-size-divisible-by", 128]
    words = [*model, *HDP, *sharded, *saving]
    assert train_to_failure(2, *words, entry=train_until_killed, folder=tmp_path) == [None, None]
    loading = [*HOST, "0", "--load", tmp_path, "--hdp-log-dir", tmp_path / "then"]
    run(corpus, None, 1, [*HDP, *sharded, *loading], train_with_drawn_memory)
    second = 2 * losses[1] - losses[0]
    assert step_losses(tmp_path / "then") == pytest.approx([second, losses[2]], rel=TOLERANCE)


def train_until_killed() -> None:
    """Entry that kills the process at the end of the second step, before it sends its gradients."""
    from megatron.bytescale.core.models.common.embeddings.host_table import TablesOfStep

    end, ended = TablesOfStep.end, []

    def end_or_die(*given: Any) -> Any:
        ended.append(given)
        if len(ended) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return end(*given)

    TablesOfStep.end = end_or_die  # type: ignore[method-assign]
    train_with_drawn_memory()


def memory_module() -> ModuleType:
    """Return the module of the memory, which imports Megatron."""
    from megatron.bytescale.core.models.common.embeddings import ngram_memory

    return ngram_memory


def draw_memory(memory: torch.nn.Module) -> None:
    """Draw all parameters by name, so that the first step has gradients everywhere."""
    for name, parameter in memory.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + memory.layer_number)
        parameter.data.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def train_with_drawn_memory() -> None:
    """Entry that trains from memories drawn by name."""
    module, build = memory_module(), importlib.import_module("megatron.bytescale.features.tables.build")
    add_memories = build.add_memories

    def add_and_draw(settings: NgramConfig, make: Any, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        add_memories(settings, make, model_chunks)
        for chunk in model_chunks:
            for part in chunk.modules():
                if isinstance(part, module.NgramMemory):
                    draw_memory(part)
        return model_chunks

    build.add_memories = add_and_draw  # type: ignore[attr-defined]
    train_and_record()


def train_plain_memory_one_by_one() -> None:
    """Entry of the oracle. Its memory has the same parameters as ours and its own forward pass."""
    from megatron.training.models.gpt import GPTModelBuilder

    draw_weights_by_name()
    build_model, module = GPTModelBuilder.build_model, memory_module()

    def build_with_memory(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = build_model(self, *args, **kwargs)
        tokens: list[list[int]] = []
        model.register_forward_pre_hook(lambda _, given: tokens.append(given[0][0].tolist()))
        for number in LAYERS:
            layer = model.decoder.layers[number - 1]
            layer.ngram_memory = module.NgramMemory(model.config, NgramConfig(LAYERS, RULE, DIM, 0), number)
            draw_memory(layer.ngram_memory)
            hook = partial(add_plainly, layer.ngram_memory, tokens)
            layer.register_forward_pre_hook(hook, with_kwargs=True)
            if hasattr(layer.ngram_memory, "count"):
                model.register_forward_pre_hook(layer.ngram_memory.count, with_kwargs=True)
        return model

    GPTModelBuilder.build_model = build_with_memory
    train_documents_one_by_one()


class PlainTable:
    """Table outside the model that row-wise Adagrad updates after each step of 8 documents."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.squares = values.requires_grad_(), torch.zeros(len(values))
        self.num_documents, self.num_labels = 0, 0.0

    def count(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Count a document before its forward pass. The first document of a step ends the previous step."""
        if self.num_documents and self.num_documents % 8 == 0:
            gradient = self.values.grad / self.num_labels
            self.squares += (gradient**2).mean(dim=1)
            self.values.data -= 0.01 * gradient / (self.squares.sqrt() + 1e-10)[:, None]
            self.values.grad, self.num_labels = None, 0.0
        self.num_documents += 1
        self.num_labels += float(kwargs["loss_mask"].sum())


def train_plain_table_one_by_one() -> None:
    """Entry of the oracle with tables outside the model."""
    module = memory_module()
    make = module.NgramMemory

    def make_beside(config: Any, settings: NgramConfig, number: int) -> Any:
        memory = make(config, replace(settings, seed=1234), number)
        table = PlainTable(memory.table.detach().clone())
        del memory.table
        memory.table, memory.count = table.values, table.count
        return memory

    module.NgramMemory = make_beside  # type: ignore[attr-defined]
    train_plain_memory_one_by_one()


def add_plainly(
    memory: Any, documents: list[list[int]], layer: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """Add the memory to the hidden states [t, 1, h] of a document, token by token."""
    hidden = kwargs["hidden_states"]
    rows = RULE.rows_of(torch.tensor(documents[-1]).numpy())
    added = []
    for token, state in zip(rows.tolist(), hidden[:, 0], strict=True):
        gram = torch.cat([memory.table[row] for row in token])
        key, value = memory.key @ gram, memory.value @ gram
        cosine = (state @ key) / ((state**2).mean().sqrt() * (key**2).mean().sqrt())
        added.append(value / (1 + torch.exp(-cosine / state.numel() ** 0.5)))
    return args, {**kwargs, "hidden_states": hidden + torch.stack(added)[:, None]}
