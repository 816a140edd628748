"""Draft heads on a frozen model: every layout has the gradients of one process, and the model does not change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.e2e.corpora import documents
from tests.e2e.drafts import (
    CLOVER,
    COMMON,
    EXPERT_RINGS,
    EXPERTS,
    HEADS,
    LATENT,
    LAYOUTS,
    ONE,
    RINGS,
    SLICES,
    TOGETHER,
    WINDOWS,
    heads_of,
    trunk,
)
from tests.e2e.oracle import gradients, relative_error, shard_of
from tests.e2e.training import MODEL, Outcome, SavedRun, train
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TOLERANCE = 1e-5
FIGURES = ("draft loss", "draft accuracy 1", "draft accuracy 3", "draft tokens accepted")
HIDDEN = "draft hidden loss"


def figures(outcome: Outcome, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"\| {name}: ([-\d.E+]+)", outcome.text)]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a sharded checkpoint by name."""
    metadata = FileSystemReader(folder).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    torch.distributed.checkpoint.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def compare(found: SavedRun, expected: SavedRun, *names: str) -> None:
    """Assert that two runs have equal losses, and equal gradients in the first step."""
    for one in names:
        wanted = figures(expected.outcomes[-1], one)
        assert len(wanted) == 2
        assert figures(found.outcomes[-1], one) == pytest.approx(wanted, rel=TOLERANCE)
    whole = gradients(expected.save)
    parts = sorted(found.save.glob("wgrads/iter_0000001/mp_rank_*"))
    of_ranks = [torch.load(part, weights_only=False, map_location="cpu").get("model_chunk0") for part in parts]
    of_ranks = [grads for grads in of_ranks if grads]  # stages below the heads have no gradients
    for rank, grads in enumerate(of_ranks):
        assert grads.keys() == whole.keys()
        for parameter, grad in grads.items():
            part_of_whole = shard_of(whole[parameter], parameter, grad, rank, len(of_ranks))
            assert relative_error(grad, part_of_whole) < TOLERANCE, parameter


@pytest.mark.parametrize("name", sampled(LAYOUTS, ["pipeline"]))
def test_gradients_equal_one_process(name: str) -> None:
    ranks, layout = LAYOUTS[name]
    expected = heads_of(1, *ONE)
    compare(heads_of(ranks, *layout), expected, *FIGURES, HIDDEN)
    whole = gradients(expected.save)
    assert len(whole) == 18
    assert all(parameter.startswith("draft_heads.") for parameter in whole)


@pytest.mark.full
def test_slices_of_a_pipeline_under_an_activation_policy() -> None:
    """These heads are not compared with the model's states, because those are in the next slice."""
    expected, found = heads_of(1, *ONE, heads=HEADS), heads_of(2, *SLICES, heads=HEADS)
    compare(found, expected, *FIGURES)
    assert not figures(found.outcomes[-1], HIDDEN)


@pytest.mark.full
def test_rings_of_a_model_that_is_trained_too() -> None:
    expected, found = heads_of(1, *ONE, heads=TOGETHER), heads_of(4, *RINGS, heads=TOGETHER)
    compare(found, expected, *FIGURES, HIDDEN, "lm loss")
    of_trunk = {name for name in gradients(expected.save) if not name.startswith("draft_heads.")}
    assert {"embedding.word_embeddings.weight", "output_layer.weight"} <= of_trunk


@pytest.mark.full
@pytest.mark.parametrize("model", [LATENT, WINDOWS], ids=["latent attention", "windows and sinks"])
def test_rings_and_slices_of_other_attention(model: list[str]) -> None:
    compare(heads_of(4, *RINGS, model=model), heads_of(1, *ONE, model=model), *FIGURES, HIDDEN)
    slices = heads_of(2, *ONE, *"--pipeline-model-parallel-size 2 --seq1f1b-slices 3".split(), heads=HEADS, model=model)
    compare(slices, heads_of(1, *ONE, heads=HEADS, model=model), *FIGURES)


@pytest.mark.full
def test_heads_of_a_model_with_experts_are_dense() -> None:
    expected, found = heads_of(1, *ONE, model=EXPERTS), heads_of(2, *EXPERT_RINGS, model=EXPERTS)
    compare(found, expected, *FIGURES, HIDDEN)
    assert not any("experts" in name or "router" in name for name in gradients(expected.save))
    before, after = tensors(trunk(EXPERTS) / "iter_0000001"), tensors(found.save / "iter_0000002")
    frozen = [name for name in before if not name.startswith("optimizer.")]
    assert any(name.endswith("router.expert_bias") for name in frozen)
    assert all(torch.equal(before[name], after[name]) for name in frozen)


@pytest.mark.full
def test_experts_are_trained_with_their_heads() -> None:
    expected, found = (
        heads_of(1, *ONE, heads=TOGETHER, model=EXPERTS),
        heads_of(2, *EXPERT_RINGS, heads=TOGETHER, model=EXPERTS),
    )
    for name in (*FIGURES, HIDDEN, "lm loss", "load_balancing_loss"):
        wanted = figures(expected.outcomes[-1], name)
        assert len(wanted) == 2
        assert figures(found.outcomes[-1], name) == pytest.approx(wanted, rel=TOLERANCE), name


@pytest.mark.full
def test_the_model_is_unchanged_and_heads_resume(tmp_path: Path) -> None:
    run = heads_of(1, *ONE)
    before, after = tensors(trunk() / "iter_0000001"), tensors(run.save / "iter_0000002")
    weights = [name for name in before if not name.startswith("optimizer.")]
    assert "decoder.final_layernorm.weight" in weights
    assert all(torch.equal(before[name], after[name]) for name in weights)
    states = [name for name in after if name.startswith("optimizer.")]
    assert states
    assert all("draft_heads" in name for name in states)
    again = [*CLOVER, "--train-iters", 2, "--load", run.save, "--ckpt-step", 1, "--save", tmp_path]
    train(1, *MODEL, *COMMON, "--data-path", documents(), *ONE, *again)
    found = tensors(tmp_path / "iter_0000002")
    assert found.keys() == after.keys()
    assert all(torch.equal(found[name], after[name]) for name in after)
    heads = [name for name in after if name.startswith("draft_heads.")]
    assert not any(torch.equal(after[name], tensors(run.save / "iter_0000001")[name]) for name in heads)
