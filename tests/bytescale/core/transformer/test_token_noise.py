"""Noise of tokens: its distribution, and its dependence on tokens instead of ranks."""

from __future__ import annotations

import math

import pytest
import torch

from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from megatron.bytescale.core.transformer.token_noise import gumbel_noise, keep_mask, numbers_of_documents, uniform_noise

EULER = 0.57721566


def test_a_standard_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(20_000), 16, (1234, 0, 1))
    assert noise.shape == (20_000, 16)
    assert noise.dtype is torch.float32
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(EULER, abs=0.01)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert float((noise < 0).double().mean()) == pytest.approx(math.exp(-1), abs=0.005)


@pytest.mark.parametrize("salt", [(1235, 0, 1), (1234, 1, 1), (1234, 0, 2), (0, 1234, 1)])
def test_seed_step_and_layer_draw_anew(salt: tuple[int, int, int]) -> None:
    tokens = torch.arange(5_000)
    first, second = gumbel_noise(tokens, 8, (1234, 0, 1)), gumbel_noise(tokens, 8, salt)
    pairs = torch.stack((first.flatten(), second.flatten()))
    assert abs(float(torch.corrcoef(pairs)[0, 1])) < 0.02


def test_a_token_keeps_its_noise_in_any_layout() -> None:
    tokens = torch.tensor([7, 3, 9, 1 << 40])
    noise = gumbel_noise(tokens, 4, (1, 2, 3))
    for row, token in enumerate(tokens):
        assert torch.equal(gumbel_noise(token[None], 4, (1, 2, 3))[0], noise[row])


def packed(*shards: Shard, padding: int = 0) -> PackedMicroBatch:
    positions = [position for shard in shards for start, stop in shard.ranges for position in range(start, stop)]
    rows = torch.tensor([*positions, *[0] * padding])
    return PackedMicroBatch(rows, rows, rows, rows.float(), MicroBatch(shards), ())


def test_numbers_of_documents_on_any_ranks() -> None:
    whole = numbers_of_documents(packed(Shard(3, ((0, 10),), (0,)), Shard(5, ((0, 4),), (0,)), padding=2))
    assert whole.shape == (16, 1)
    assert len(set(whole[:14, 0].tolist())) == 14
    assert whole[14:].tolist() == [[-1], [-1]]
    parts = [numbers_of_documents(packed(Shard(3, zigzag_ranges(10, 2, member), (0, 1)))) for member in range(2)]
    assert sorted(torch.cat(parts).flatten().tolist()) == whole[:10, 0].tolist()
    assert numbers_of_documents(packed(padding=3)).tolist() == [[-1]] * 3


def test_masks_drop_the_asked_share_and_differ_between_tokens_columns_and_salts() -> None:
    tokens = torch.arange(400)
    kept = keep_mask(tokens, 500, 0.3, (7, 1))
    assert float(kept.double().mean()) == pytest.approx(0.7, abs=0.005)
    assert float(kept.double().mean(0).std()) == pytest.approx((0.3 * 0.7 / 400) ** 0.5, rel=0.15)
    assert float(kept.double().mean(1).std()) == pytest.approx((0.3 * 0.7 / 500) ** 0.5, rel=0.15)
    for other in (keep_mask(tokens + 400, 500, 0.3, (7, 1)), keep_mask(tokens, 500, 0.3, (7, 2))):
        assert float((kept & other).double().mean()) == pytest.approx(0.49, abs=0.005), "independent masks"
    assert torch.equal(keep_mask(tokens[20:30], 500, 0.3, (7, 1)), kept[20:30]), "a token keeps its mask"
    assert keep_mask(tokens, 3, 0.0, (7,)).all()


def test_uniform_noise_is_uniform() -> None:
    noise = uniform_noise(torch.arange(1000), 100, (3,))
    assert 0 < float(noise.min()) < 1e-4 < 1 - 1e-4 < float(noise.max()) < 1
    assert torch.histc(noise, 10, 0, 1) / noise.numel() == pytest.approx(torch.full((10,), 0.1).numpy(), abs=0.005)
