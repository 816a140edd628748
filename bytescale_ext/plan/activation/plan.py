"""Plan of a layer's saved tensors: kept on the device, swapped to host memory, or recomputed.

The shares of an ``ActivationPlan`` divide the tokens of a micro-batch, in their order::

    token   0            a             b            s
            |  swapped   |    kept     | recomputed |      a = swap s, b = (1 - recompute) s

``policies.py`` makes plans, ``forecast.py`` predicts their time and memory, and ``check.py`` validates them.
"""

from __future__ import annotations

from dataclasses import dataclass

from bytescale_ext.plan.activation.tensors import LayerTensor


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """Shares of one micro-batch, equal for every layer. The module shows the order of the tokens.

    Attributes:
        policy: policy that made the plan, one of ``policies.POLICIES``, or "shares" for given shares.
        swap: share of the tokens whose tensors are swapped, except tensors of kind "input".
        recompute: share of the tokens whose tensors are recomputed, except tensors of kind "input".
        input_swap: swapped share of the tensors of kind "input"; the rest is kept.
        rebuild_cheap: whether tensors of kind "cheap" are recomputed for all tokens, instead of kept or swapped.
        resident_layers: number of last layers whose tensors are all kept.
    """

    policy: str
    swap: float = 0.0
    recompute: float = 0.0
    input_swap: float = 0.0
    rebuild_cheap: bool = False
    resident_layers: int = 0

    def __post_init__(self) -> None:
        for name, share in (("swap", self.swap), ("recompute", self.recompute), ("input swap", self.input_swap)):
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"the {name} fraction is {share:g}; it must be a share of the tokens, from 0 to 1")
        if self.swap + self.recompute > 1.0 + 1e-9:
            raise ValueError(
                f"the swap fraction {self.swap:g} and the recompute fraction {self.recompute:g} sum to more than 1; "
                "the rest of the tokens is kept"
            )

    @property
    def keep(self) -> float:
        """Share of the tokens whose tensors stay on the device."""
        return max(0.0, 1.0 - self.swap - self.recompute)

    @property
    def is_off(self) -> bool:
        """Whether nothing is swapped or recomputed."""
        return not (self.swap or self.recompute or self.input_swap or self.rebuild_cheap)

    def shares(self, tensor: LayerTensor) -> tuple[float, float, float]:
        """Return the (swapped, kept, recomputed) shares of a tensor in a layer that is not resident."""
        if tensor.kind == "input":
            return self.input_swap, 1.0 - self.input_swap, 0.0
        # keys and views are rebuilt, or they are in the output of a product, which is stored
        if tensor.kind in ("key", "view") and not self.rebuild_cheap:
            return 0.0, 0.0, 1.0
        if tensor.kind == "cheap" and self.rebuild_cheap:
            return 0.0, 0.0, 1.0
        return self.swap, self.keep, self.recompute
