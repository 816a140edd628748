"""The small model of bytes: what it attends to, its steps, and its losses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from scripts.bench.data.byte_model import (
    IGNORED,
    ByteModel,
    ModelSize,
    Schedule,
    batch_of,
    batches_of,
    losses_by_position,
    token_losses,
    train,
)

TINY = ModelSize(width=32, layers=1, heads=2, rows=64)


@pytest.fixture
def model() -> ByteModel:
    torch.manual_seed(0)
    made = ByteModel(TINY)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # zeros at the start would hide what reaches the logits
    return made


def window(seed: int, length: int) -> np.ndarray:
    return np.random.RandomState(seed).randint(97, 122, length).astype(np.uint16)


def test_a_token_depends_on_those_before_it_alone(model: ByteModel) -> None:
    tokens = torch.from_numpy(window(0, 40).astype(np.int64))[None]
    changed = tokens.clone()
    changed[0, 20] = 65
    before, after = model(tokens)[0], model(changed)[0]
    assert torch.equal(before[:20], after[:20])
    assert not torch.equal(before[20], after[20])
    assert not torch.equal(before[39], after[39])  # beyond the runs of 4 bytes: by attention


def test_the_default_has_the_parameters_that_are_claimed() -> None:
    assert 1_000_000 < sum(one.numel() for one in ByteModel(ModelSize()).parameters()) < 2_000_000


def test_a_batch_is_padded_without_labels() -> None:
    tokens, labels = batch_of([np.array([1, 2, 3], np.uint16), np.array([4, 5], np.uint16)])
    assert tokens.tolist() == [[1, 2, 3], [4, 5, 256]]
    assert labels.tolist() == [[2, 3, IGNORED], [5, IGNORED, IGNORED]]


@pytest.mark.parametrize("length", [90, 100])
def test_fuller_windows_take_as_many_steps(length: int) -> None:
    windows = [window(place, length) for place in range(9000 // length)]
    batches = batches_of(windows, 450)
    assert len(batches) == 20
    assert [len(one) for batch in batches for one in batch] == [length] * len(windows)


def test_few_windows_are_a_step_each() -> None:
    assert len(batches_of([window(0, 100)] * 2, 10)) == 2
    assert len(batches_of([window(0, 10)], 4096)) == 1


def test_it_learns_a_text_and_looks_up_what_was_there() -> None:
    torch.manual_seed(0)
    model = ByteModel(TINY)
    losses = train(model, [np.tile(window(place, 16), 4) for place in range(200)], Schedule(step_tokens=256))
    assert len(losses) == 50
    assert losses[0] == pytest.approx(math.log(257), abs=1e-3)
    assert losses[-1] < 3.3  # 3.22 is the entropy of 25 letters that are equally likely
    again = losses_by_position(model, [np.tile(window(place, 16), 4) for place in range(900, 904)], 64, 2)
    assert all(map(math.isfinite, again))


def test_losses_are_of_each_token_but_the_first(model: ByteModel) -> None:
    windows = [window(place, 30 - place) for place in range(6)]
    found = token_losses(model, windows)
    assert [len(losses) for losses, _ in found] == [29, 28, 27, 26, 25, 24]
    alone, right = token_losses(model, windows[5:])[0]
    assert found[5][0] == pytest.approx(alone, abs=0.05)  # in a batch, padded, in bfloat16
    logits = model(torch.from_numpy(windows[5].astype(np.int64))[None])[0, :-1]
    expected = torch.nn.functional.cross_entropy(logits, torch.from_numpy(windows[5][1:].astype(np.int64)))
    assert alone.mean() == pytest.approx(expected.item(), rel=1e-3)
    assert right.tolist() == (logits.argmax(-1).numpy() == windows[5][1:]).tolist()


def test_losses_by_position(model: ByteModel) -> None:
    windows = [window(0, 20), window(1, 10)]
    both = [losses for losses, _ in token_losses(model, windows)]
    halves = losses_by_position(model, windows, 20, 2)
    assert halves[0] == pytest.approx(np.concatenate([both[0][:9], both[1]]).mean(), rel=1e-3)
    assert halves[1] == pytest.approx(both[0][9:].mean(), rel=1e-3)
    assert math.isnan(losses_by_position(model, windows[1:], 40, 4)[3])
