"""ByteScale's selective offloading (section 5.2, Eq. 3): tokens that fit on a rank with activations in host memory.

``OffloadLimits`` belongs to the HDP planner, which gives a sequence fewer ranks when offloading makes room for it.
``policies.plan_offload`` chooses the share of a micro-batch whose ranks are already fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.cost.cost_model import CostModel

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    """Bounds on the share r of a micro-batch's activations that moves to host memory (ByteScale Eq. 3).

    Two of the l layers stay on the device: the layer that computes and the layer that is being copied. The other layers
    keep the share ``1 - r``. So n tokens take the device memory of ``n (2 + (1 - r) (l - 2)) / l`` tokens. The paper
    prints ``1 >= r >= min(1, ...)``. We read it as 0 <= r <= 1, where a layer moves at most as many bytes as the link
    copies while one layer computes. We add a bound by host memory, which the paper does not have.

    Attributes:
        num_layers: l, the layers of a rank.
        layer_bytes_per_token: bytes of activations that a token keeps in a layer.
        bytes_per_second: speed between device and host, in the slower direction.
        host_bytes: host memory for one micro-batch of one rank.
    """

    num_layers: int
    layer_bytes_per_token: float
    bytes_per_second: float
    host_bytes: float

    def __post_init__(self) -> None:
        if self.num_layers < 1 or min(self.layer_bytes_per_token, self.bytes_per_second) <= 0 or self.host_bytes < 0:
            raise ValueError(f"offload limits need layers, bytes and bytes per second above 0: {self}")

    def hidden_shares(self, lengths: Floats, forward: CostModel) -> Floats:
        """Return the largest share of each sequence whose copy overlaps with computation, T(s) >= r Act(s) / B: [n].

        The width of the ring divides both sides of Eq. 3, so the share depends only on the length.

        Args:
            lengths: tokens of each sequence, [n].
            forward: forward cost of the rank's ``num_layers`` layers.
        """
        layer_seconds = (forward.a * forward.squares(lengths) + forward.b * lengths) / self.num_layers
        return np.minimum(1.0, layer_seconds * self.bytes_per_second / (self.layer_bytes_per_token * lengths))

    def max_tokens(self, lengths: Floats, tokens_per_rank: int, forward: CostModel) -> Floats:
        """Return the tokens of each sequence that fit on a rank with offloading: [n], at least ``tokens_per_rank``.

        D(s) in Eq. 3 is the length divided by this number. Host memory must store the activations of ``n - C`` tokens
        in all layers, so it allows ``C + host_bytes / (l Act(1))`` tokens.

        Args:
            lengths: tokens of each sequence, [n].
            tokens_per_rank: C.
            forward: forward cost of the rank's ``num_layers`` layers.
        """
        if self.num_layers <= 2:
            return np.full(len(lengths), float(tokens_per_rank))
        kept = 1.0 - self.hidden_shares(lengths, forward) * (self.num_layers - 2) / self.num_layers
        on_host = self.host_bytes / (self.num_layers * self.layer_bytes_per_token)
        return np.minimum(tokens_per_rank / kept, tokens_per_rank + on_host)

    def min_shares(self, num_tokens: Floats, tokens_per_rank: int) -> Floats:
        """Return the smallest shares with which micro-batches of ``num_tokens``, [n], fit: [n], 0 if all fits."""
        if self.num_layers <= 2:
            return np.zeros(len(num_tokens))
        kept = tokens_per_rank / np.maximum(num_tokens, 1.0)
        return np.clip((1.0 - kept) * self.num_layers / (self.num_layers - 2), 0.0, 1.0)

    def min_capacity(self, length: int, num_tokens: int, forward: CostModel) -> float:
        """Return the smallest C with which ``num_tokens`` tokens of a sequence of ``length`` tokens fit on one rank."""
        if self.num_layers <= 2:
            return float(num_tokens)
        share = float(self.hidden_shares(np.array([float(length)]), forward)[0])
        on_host = self.host_bytes / (self.num_layers * self.layer_bytes_per_token)
        return max(num_tokens * (1.0 - share * (self.num_layers - 2) / self.num_layers), num_tokens - on_host)
