"""Links that match a real cluster."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.plan.cost.model_shape import key_value_bytes
from scripts.cluster.spec import SPECS, matched_links

COST = replace(shipped("bytescale_7b"), dtype="float32")


def test_exchange_takes_the_same_share_of_attention_as_on_the_real_cluster() -> None:
    """On both clusters the keys of a document arrive in the same share of the time of its attention."""
    spec, cores, scale, tokens = SPECS["H200-IB"], 0.25, 32.0, 4096
    links = matched_links(spec, COST, cores, scale)
    emulated = key_value_bytes(COST.shape, 1, 4) * tokens / (links.inter_gbps * 1e9 / 8)
    emulated /= COST.forward.a / cores * tokens**2
    real = key_value_bytes(spec.shape) * scale * tokens / (spec.nic_gbps * 1e9 / 8)
    real /= spec.seconds_per_square * (scale * tokens) ** 2
    assert emulated == pytest.approx(real)
    assert links.intra_gbps / links.inter_gbps == pytest.approx(9.0)


def test_the_arithmetic_is_printed() -> None:
    links = matched_links(SPECS["H200-IB"], COST, 0.25, 32.0)
    assert "341 TFLOP/s" in links.text
    assert f"between nodes 400 -> {links.inter_gbps:.3g} Gbit/s, inside 3600 -> {links.intra_gbps:.3g}" in links.text


@pytest.mark.parametrize(("dtype", "scale", "words"), [("int8", 1.0, "int8"), ("float32", 0.0, "--length-scale 0")])
def test_bad_costs_and_scales_are_refused(dtype: str, scale: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        matched_links(SPECS["H200-IB"], replace(COST, dtype=dtype), 0.25, scale)
