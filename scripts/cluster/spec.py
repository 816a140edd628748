"""Links of an emulated cluster that match a real cluster: the same time to receive keys for the same attention.

On a real cluster a rank computes the causal attention of S tokens in ``a S^2`` seconds a layer and receives the keys
and values of a token in ``c`` seconds. On the emulated cluster a document is ``scale`` times shorter, and a token costs
``a'`` and ``c'``. The same share of the exchange overlaps with attention if ``c' s / (a' s^2) = c S / (a S^2)``, hence

    bytes'/s = bytes/s x scale x (bytes' of a token / bytes of a token) x (a / a')
"""

from __future__ import annotations

from dataclasses import dataclass

from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B, ModelShape, attention_flops_per_square, key_value_bytes

ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Spec:
    """A real cluster.

    Attributes:
        tflops: TFLOP/s of one GPU in the forward pass of causal attention.
        nvlink_gbps, nic_gbps: Gbit/s from one GPU to its own node and to other nodes.
        shape: model, in bfloat16.
    """

    tflops: float
    nvlink_gbps: float
    nic_gbps: float
    shape: ModelShape = LLAMA_7B

    @property
    def seconds_per_square(self) -> float:
        """Seconds of attention in one layer for a squared token: a."""
        return attention_flops_per_square(self.shape) / self.shape.num_layers / (self.tflops * 1e12)


SPECS = {
    "H200-IB": Spec(341.0, 3600.0, 400.0),
    "H100-IB": Spec(341.0, 3600.0, 400.0),
    "H100-ETH": Spec(341.0, 3600.0, 100.0),
    "A100-IB": Spec(180.0, 2400.0, 200.0),
}
"""Clusters by name. NVLink and NIC have the vendors' rates in one direction. Attention on Hopper has the rate that
DistCA measured with flash-attn 2 on an H100 (64 heads of 128, 64K tokens: 206 ms), on A100 the rate of FlashAttention-2
(Dao 2023, figure 4)."""


@dataclass(frozen=True)
class Links:
    """Links of an emulated rank in Gbit/s, and their derivation as text."""

    inter_gbps: float
    intra_gbps: float
    text: str


def matched_links(spec: Spec, cost: ModelCost, cores_per_rank: float, scale: float) -> Links:
    """Return the links that match a cluster.

    Args:
        spec: real cluster.
        cost: costs of the emulated ranks in processor seconds, as ``bytescale profile`` writes them on CPU.
        cores_per_rank: share of a core of an emulated rank.
        scale: tokens of a real document per token of an emulated document.

    Raises:
        ValueError: the scale is not positive, or the type of the numbers is unknown.
    """
    if scale <= 0:
        raise ValueError(f"--length-scale {scale:g} must be positive")
    if cost.dtype not in ELEMENT_BYTES:
        raise ValueError(f"the cost file is for {cost.dtype}; known are {', '.join(ELEMENT_BYTES)}")
    real_bytes = key_value_bytes(spec.shape)
    own_bytes = key_value_bytes(cost.shape, cost.tensor_parallel, cost.element_bytes)
    own_square = cost.forward.a / cores_per_rank
    factor = scale * (own_bytes / real_bytes) * (spec.seconds_per_square / own_square)
    inter, intra = spec.nic_gbps * factor, spec.nvlink_gbps * factor
    text = (
        f"real: {real_bytes:,.0f} bytes of keys and values a token, attention {spec.seconds_per_square:.3g} s a "
        f"squared token ({spec.tflops:g} TFLOP/s); emulated: {own_bytes:,.0f} bytes, {own_square:.3g} s; documents "
        f"1:{scale:g}\n"
        f"factor of links: {scale:g} x {own_bytes / real_bytes:.4g} x {spec.seconds_per_square / own_square:.4g} = "
        f"{factor:.4g}: between nodes {spec.nic_gbps:g} -> {inter:.3g} Gbit/s, inside {spec.nvlink_gbps:g} -> "
        f"{intra:.3g} Gbit/s"
    )
    return Links(inter, intra, text)
