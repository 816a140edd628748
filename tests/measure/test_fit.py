"""Fit of measured times: it recovers the constants of synthetic times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from bytescale_ext.measure.fit import (
    LAYERS,
    Fit,
    Origin,
    Ring,
    Timing,
    fit_constants,
    fit_rings,
    fit_timings,
    fitted_lengths,
    fitted_rings,
    model_cost,
    predict,
    rank_correlation,
    unseen_lengths,
    unseen_rings,
    virtual_rings,
    with_blocks,
)
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_shape import LatentShape, ModelShape, ring_bytes_per_token

FORWARD = Fit(CostModel(a=4e-11, b=1.6e-6, g=1e-4), head=1.2e-6, rest=3e-4)
BACKWARD = Fit(CostModel(a=1e-10, b=3.2e-6, g=2e-4), head=2.4e-6, rest=5e-4)
SHAPE = ModelShape(32, 4096, 32, 8, 128, 11008, True, 32000)


def seconds(fit: Fit, num_layers: int, lengths: Sequence[int]) -> float:
    """Return the seconds by the formula of the module."""
    squares, tokens = sum(length**2 for length in lengths), sum(lengths)
    layer = fit.layer.a * squares + fit.layer.b * tokens + fit.layer.g
    return num_layers * layer + fit.head * tokens + fit.rest


def timings(packs: Sequence[tuple[int, ...]], noise: Callable[[], float] = lambda: 1.0) -> list[Timing]:
    return [
        Timing(layers, pack, seconds(FORWARD, layers, pack) * noise(), seconds(BACKWARD, layers, pack) * noise())
        for layers in LAYERS
        for pack in packs
    ]


def constants(fit: Fit) -> list[float]:
    return [fit.layer.a, fit.layer.b, fit.layer.g, fit.head, fit.rest]


def test_exact_times_give_back_their_constants() -> None:
    found = fit_timings(timings(fitted_lengths(32768)))
    for fit, true in zip(found, (FORWARD, BACKWARD), strict=True):
        assert constants(fit) == pytest.approx(constants(true), rel=1e-6)
        assert fit.layer.c == 0


def test_noisy_times_still_predict_other_lengths() -> None:
    generator = np.random.default_rng(0)
    fits = fit_timings(timings(fitted_lengths(32768), lambda: 1 + 0.02 * generator.standard_normal()))
    found = predict(fits, timings(unseen_lengths(32768)))
    assert max(abs(one.error) for one in found) < 0.04
    assert fits[0].layer.a == pytest.approx(FORWARD.layer.a, rel=0.2)


def test_no_constant_is_negative() -> None:
    """Times that fall with the number of micro-batches would need a negative fixed cost."""
    packs = fitted_lengths(4096)
    made = [Timing(t.num_layers, t.lengths, t.forward_seconds - 5e-4 * t.num_layers, t.backward_seconds)
            for t in timings(packs) if sum(t.lengths) > 1000]  # fmt: skip
    forward, _ = fit_timings(made)
    assert min(constants(forward)) >= 0
    assert 0 in constants(forward)


@pytest.mark.slow
def test_the_best_of_the_constants_from_0_on() -> None:
    """The result equals the best of a fine grid."""
    features = np.array([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    found = fit_constants(features, np.array([1.0, 3.0, 5.0]))  # a line through -1
    assert found[1] == 0
    grid = np.linspace(0, 3, 301)
    losses = [[float((((features @ [x, y]) / [1, 3, 5] - 1) ** 2).sum()) for y in grid] for x in grid]
    assert float((((features @ found) / [1, 3, 5] - 1) ** 2).sum()) <= np.min(losses)


def test_noise_is_refused() -> None:
    flat = [Timing(t.num_layers, t.lengths, 1.0, 1.0) for t in timings(fitted_lengths(256))]
    with pytest.raises(ValueError, match=r"forward times are too short or too noisy.*--max-tokens"):
        fit_timings(flat)


RING = (CostModel(0.0, 0.0, c=3e-8, h=5e-7, m=2e-5), CostModel(0.0, 0.0, c=9e-8, h=8e-7, m=7e-5))


def ring_timings(
    rings: Sequence[Ring], noise: Callable[[], float] = lambda: 1.0, has_waits: bool = True
) -> list[Timing]:
    """Return times of a rank's share of the sequences, plus the cost of received tokens."""
    made = []
    for layers in LAYERS:
        for lengths, width in rings:
            times = []
            for fit, ring in zip((FORWARD, BACKWARD), RING, strict=True):
                layer = fit.layer.g
                for length in lengths:
                    received = length * (width - 1) / width
                    layer += max(fit.layer.a * length**2 / width, has_waits * ring.c * received)
                    layer += fit.layer.b * length / width + ring.h * received + ring.m * (width - 1)
                times.append((layers * layer + fit.head * sum(lengths) / width + fit.rest) * noise())
            made.append(Timing(layers, lengths, *times, width))
    return made


def of_one(length: int, width: int) -> Ring:
    return (length,), width


@pytest.mark.parametrize("width", [2, 3, 8])
@pytest.mark.parametrize("has_waits", [True, False])
def test_rings_give_back_their_constants(width: int, has_waits: bool) -> None:
    c = (RING[0].c, RING[1].c)
    made = ring_timings(fitted_rings(32768, width), has_waits=has_waits)
    found = fit_rings((FORWARD, BACKWARD), made, c, has_waits)
    for fit, true, ring in zip(found, (FORWARD, BACKWARD), RING, strict=True):
        assert (fit.layer.h, fit.layer.m) == pytest.approx((ring.h, ring.m))
        assert replace(fit, layer=replace(fit.layer, c=0.0, h=0.0, m=0.0)) == true
    errors = [one.error for one in predict(found, ring_timings(unseen_rings(32768, width)))]
    assert errors == pytest.approx([0.0] * len(errors), abs=1e-12)


def test_short_sequences_tell_m_where_times_hold_no_waiting() -> None:
    """On a slow link the exchange takes longer than attention, so times with waiting are not used."""
    c, rings = (1e-6, 3e-6), [of_one(32768, 2), ((256,) * 16, 2), of_one(16384, 2)]
    made = ring_timings(rings, has_waits=False)
    (forward, backward), waited = (fit_rings((FORWARD, BACKWARD), made, c, each) for each in (False, True))
    assert (forward.layer.m, backward.layer.m) == pytest.approx((RING[0].m, RING[1].m))
    assert [fit.layer.m for fit in waited] == [0.0, 0.0]


def test_narrow_and_wide_rings_share_one_h() -> None:
    """If the measurements differ, the result is in between, so that neither kind is always overestimated."""
    rings = fitted_rings(32768, 8)
    made = ring_timings(rings)
    free = [replace(one, forward_seconds=FORWARD.seconds(one), backward_seconds=BACKWARD.seconds(one)) for one in made]
    mixed = [costly if costly.width == 8 else cheap for costly, cheap in zip(made, free, strict=True)]
    found = [[fit.layer.h for fit in fit_rings((FORWARD, BACKWARD), one, (0.0, 0.0))] for one in (free, mixed, made)]
    for low, middle, high in zip(*found, strict=True):
        assert low == pytest.approx(0.0, abs=1e-15)
        assert 0.1 * high < middle < high


def test_noisy_rings() -> None:
    generator = np.random.default_rng(0)
    made = ring_timings(fitted_rings(32768, 2), lambda: 1 + 0.01 * generator.standard_normal())
    found = fit_rings((FORWARD, BACKWARD), made, (0.0, 0.0))
    assert found[1].layer.h == pytest.approx(RING[1].h, rel=0.15)


def test_rings_that_wait_for_their_exchange_tell_nothing_of_h() -> None:
    """Their time is part of c and would be counted twice."""
    slow = (1e-3, 1e-3)
    made = ring_timings([of_one(1000, 2), of_one(2000, 2)])
    assert [fit.layer.h for fit in fit_rings((FORWARD, BACKWARD), made, slow)] == [0.0, 0.0]
    fast = ring_timings([of_one(1_000_000_000, 2)])  # their attention is even longer
    both = fit_rings((FORWARD, BACKWARD), [*made, *fast], slow)
    alone = fit_rings((FORWARD, BACKWARD), fast, slow)
    assert both == alone
    assert alone[0].layer.h > 0


@pytest.mark.parametrize("max_tokens", [64, 32768])
def test_blocks_that_one_rank_measures_give_back_their_constants(max_tokens: int) -> None:
    rings, bare = virtual_rings(max_tokens), CostModel(0.0, 0.0)
    assert all(min(lengths) >= 2 * width for lengths, width in rings), "each rank has a front and a back part"
    blocks = [replace(bare, h=ring.h, m=ring.m) for ring in RING]
    seconds = [
        (sum(blocks[0].sequence_cost(one, width) for one in lengths),
         sum(blocks[1].sequence_cost(one, width) for one in lengths))
        for lengths, width in rings
    ]  # fmt: skip
    timed = with_blocks((FORWARD, BACKWARD), rings, seconds)
    for fit, ring in zip(fit_rings((FORWARD, BACKWARD), timed, (1.0, 1.0), has_waits=False), RING, strict=True):
        assert (fit.layer.h, fit.layer.m) == pytest.approx((ring.h, ring.m))
        assert fit.layer.c == 1.0


@pytest.mark.parametrize("max_tokens", [64, 100, 4096, 32768])
def test_measured_lengths(max_tokens: int) -> None:
    fitted, unseen = fitted_lengths(max_tokens), unseen_lengths(max_tokens)
    for pack in (*fitted, *unseen):
        assert 1 <= sum(pack) <= max_tokens
        assert min(pack) >= 1
    assert not set(fitted) & set(unseen)
    assert sum(len(pack) > 1 for pack in fitted) >= 5  # micro-batches of training are packs
    assert any(len(pack) > 1 for pack in unseen)
    assert any(len(pack) == 1 for pack in unseen)
    assert max(sum(pack) for pack in fitted) == max_tokens
    for num_ranks, widths in ((2, {2}), (3, {3}), (8, {2, 8}), (9, {3, 9})):
        seen, others = fitted_rings(max_tokens, num_ranks), unseen_rings(max_tokens, num_ranks)
        for lengths, width in (*seen, *others):
            assert max_tokens // 4 <= sum(lengths) / width <= max_tokens // 2
            assert min(lengths) >= width
        assert not set(seen) & set(others)
        assert {width for _, width in seen} == {width for _, width in others} == widths
    assert not fitted_rings(max_tokens, 1)


def test_the_cost_file_of_a_fit() -> None:
    made = ring_timings([of_one(32768, 2), ((512,) * 16, 2)], has_waits=False)
    fits = fit_rings((FORWARD, BACKWARD), made, (3e-8, 9e-8), has_waits=False)
    cost = model_cost(fits, (139e3, 8192.0), Origin(SHAPE, "a GPU", "bfloat16", 1, "test"))
    (h, m), (backward_h, backward_m) = ((fit.layer.h, fit.layer.m) for fit in fits)
    assert cost.forward == CostModel(4e-11, 1.6e-6, 3e-8, 1e-4 + 3e-4 / 32, h, m=m)
    assert cost.backward == CostModel(1e-10, 3.2e-6, 9e-8, 2e-4 + 5e-4 / 32, backward_h, m=backward_m)
    assert cost.forward.h == pytest.approx(5e-7)
    # the whole model has the cost of the module's formula
    for fit, whole in ((FORWARD, cost.whole().forward), (BACKWARD, cost.whole().backward)):
        expected = seconds(fit, 32, (4096, 512))
        assert whole.g + sum(whole.sequence_cost(length, 1) for length in (4096, 512)) == pytest.approx(expected)
    assert (cost.layer_bytes, cost.recompute_bytes) == (139e3, 8192.0)


def test_ring_bytes_by_hand() -> None:
    # keys and values of 8 heads of 128 numbers; backward again in 2 bytes, and their gradients in 4 bytes
    assert ring_bytes_per_token(SHAPE, 1, 2, 4) == (2 * 8 * 128 * 2, 2 * 8 * 128 * 6)
    assert ring_bytes_per_token(SHAPE, 4, 2, 4) == (2 * 2 * 128 * 2, 2 * 2 * 128 * 6)
    assert ring_bytes_per_token(SHAPE, 16, 2, 4) == (2 * 1 * 128 * 2, 2 * 1 * 128 * 6)  # a head is not divided
    latents = replace(SHAPE, num_kv_heads=32, head_dim=192, latent=LatentShape(0, 512, 64, 128))
    assert ring_bytes_per_token(latents, 1, 2, 4) == ring_bytes_per_token(latents, 4, 2, 4) == (576 * 2, 576 * 6)


def test_rank_correlation() -> None:
    assert rank_correlation([(1.0, 10.0), (2.0, 20.0), (3.0, 90.0)]) == pytest.approx(1.0)
    assert rank_correlation([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) == pytest.approx(-1.0)
    assert rank_correlation([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == pytest.approx(0.5)
    assert rank_correlation([(1.0, 1.0), (1.0, 2.0), (2.0, 3.0)]) == pytest.approx(
        0.75**0.5
    )  # equal documents share a rank
    assert rank_correlation([(1.0, 1.0), (1.0, 2.0)]) is None
