"""Cost of one model: in seconds from a cost file, or in FLOPs from the model's sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import numpy as np

from bytescale_ext.plan.cost.cost_model import CostModel, StageCost
from bytescale_ext.plan.cost.entries import entries_of, from_entries
from bytescale_ext.plan.cost.model_shape import (
    BACKWARD_PER_FORWARD,
    LatentShape,
    ModelShape,
    attention_flops_per_square,
    expansion_flops,
    key_value_bytes,
    linear_flops_per_token,
)
from bytescale_ext.plan.cost.nodes import Nodes
from bytescale_ext.plan.step.sizes import Cluster

LINK_BYTES_PER_SECOND: Final = 55e9
"""Default bandwidth between a GPU and page-locked host memory, one way: PCIe 5."""

NOT_IN_FILES: Final = ("nodes", "window", "window_share", "e")
"""Fields of ``CostModel`` that depend on the run and are not in a cost file; measured rings include ``e`` in ``h``."""

SHAPE_NOT_IN_FILES: Final = (
    "num_window_layers", "window_tokens", "later_layers", "later_experts", "later_repeats",
)  # fmt: skip
"""Fields of ``ModelShape`` that are not in a cost file, because it has the costs of one layer with full attention."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Costs of one model on one device, in seconds and bytes: the content of a cost file.

    Attributes:
        shape: the measured model; the file is refused for other models.
        device: name of the hardware.
        dtype: parameter type, for example "bfloat16".
        tensor_parallel: ranks that share each layer.
        source: origin of the constants: a measurement, or a paper with figure and equation.
        forward, backward: cost of one layer on one rank. ``g`` is the overhead of a layer for each micro-batch. Files
            have no second forward pass of recomputed layers: ``with_second_forward`` adds it.
        head_forward, head_backward: seconds per token of embedding, output layer and loss together.
        layer_bytes: bytes of activations per token that a layer keeps until its backward pass.
        recompute_bytes: ``layer_bytes`` with full recompute: the input of the layer.
        collective: seconds per byte that a rank receives in collectives of its node or, with tensor parallelism, of its
            tensor-parallel group, which ``forward`` and ``backward`` then include; 0: not measured separately.
        latency: seconds of such a collective, or of a message, of a few bytes; 0: not measured.
        slowdown: time to receive a byte from another node, relative to a byte from the own node, which the ``c`` of
            both passes counts; 1: there is one node, or links between nodes were not measured separately.
    """

    shape: ModelShape
    device: str
    dtype: str
    tensor_parallel: int
    source: str
    forward: CostModel
    backward: CostModel
    head_forward: float
    head_backward: float
    layer_bytes: float
    recompute_bytes: float
    collective: float = 0.0
    slowdown: float = 1.0
    latency: float = 0.0

    @property
    def on_cuda(self) -> bool:
        """Whether the device is a GPU."""
        return not self.device.startswith("CPU")

    @property
    def element_bytes(self) -> int:
        """Bytes of one element of a parameter or activation."""
        return 4 if self.dtype == "float32" else 2

    def stage(self, num_layers: int, has_head: bool = False, link: float = LINK_BYTES_PER_SECOND) -> StageCost:
        """Return the cost of a stage of ``num_layers`` layers. Layers with a window count as if spread evenly.

        Args:
            num_layers: transformer layers of the stage.
            has_head: whether to add embedding, output layer and the layers of multi-token prediction, each with its own
                output layer.
            link: bytes per second between the device and host memory, one way, for swapped keys.
        """
        later = self.shape.later_layers if has_head else 0
        full = (cost.scaled(num_layers + later) for cost in (self.forward, self.backward))
        forward, backward = (with_windows(cost, self.shape) for cost in full)
        if has_head:
            forward = replace(forward, b=forward.b + (1 + later) * self.head_forward)
            backward = replace(backward, b=backward.b + (1 + later) * self.head_backward)
        keys = key_value_bytes(self.shape, self.tensor_parallel, self.element_bytes)
        return StageCost(forward, backward, num_layers * keys / link)

    def nodes(self, cluster: Cluster) -> Nodes | None:
        """Return the nodes of a cluster, or None if all its links are equally fast or nothing is known about nodes."""
        if cluster.ranks_per_node is None or self.slowdown <= 1.0:
            return None
        return Nodes(cluster.node_ranks, self.slowdown, cluster.hierarchical_rings != "off")

    def whole(self) -> StageCost:
        """Return the cost of the whole model on one rank."""
        return self.stage(self.shape.num_layers, has_head=True)

    def to_json(self) -> dict[str, object]:
        """Return plain dicts, the format of a cost file, without the nodes and windows of a run."""
        value = asdict(self)
        for part, names in _LEFT_OUT.items():
            for name in names:
                del value[part][name]
        if self.shape.latent is None:
            del value["shape"]["latent"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> ModelCost:
        """Return the cost that ``to_json`` wrote. Raises ValueError for a missing, unknown or negative entry."""
        try:
            shape = from_entries(ModelShape, value["shape"])
            if shape.latent is not None:
                shape = replace(shape, latent=from_entries(LatentShape, shape.latent))
            passes = {name: from_entries(CostModel, value[name]) for name in ("forward", "backward")}
            cost = from_entries(cls, {**value, "shape": shape, **passes})
            for name in (*NOT_IN_FILES, *SHAPE_NOT_IN_FILES):
                if any(name in entries_of(value[part]) for part in _LEFT_OUT):
                    raise TypeError(f"{name} is not an entry")
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cost file ({error}); `bytescale profile` writes one") from None
        cost._check()
        return cost

    def _check(self) -> None:
        numbers = {f"{name}.{key}": number for name in ("forward", "backward")
                   for key, number in asdict(getattr(self, name)).items() if key not in NOT_IN_FILES}  # fmt: skip
        numbers |= {name: getattr(self, name) for name in _NUMBERS}
        for name, number in numbers.items():
            if not isinstance(number, int | float) or not 0 <= number < float("inf"):
                raise ValueError(f"the cost file's {name} is {number}; constants must be numbers of at least 0")
        for name in ("forward.a", "forward.b", "backward.a", "backward.b"):
            if not numbers[name]:
                raise ValueError(f"the cost file's {name} is 0: attention and linear work both cost time")


_LEFT_OUT: Final = {"forward": NOT_IN_FILES, "backward": NOT_IN_FILES, "shape": SHAPE_NOT_IN_FILES}
_NUMBERS: Final = (
    "head_forward", "head_backward", "layer_bytes", "recompute_bytes", "collective", "slowdown", "latency",
)  # fmt: skip


def with_second_forward(cost: ModelCost, layers: bool, head: bool) -> ModelCost:
    """Return the cost of passes whose backward pass computes all layers, or the output layer and loss, once more."""
    return _with_forwards(cost, float(layers), float(head))


def without_second_forward(cost: ModelCost, layers: bool, head: bool) -> ModelCost:
    """Return the cost to which ``with_second_forward`` added these passes, up to rounding."""
    return _with_forwards(cost, -float(layers), -float(head))


def _with_forwards(cost: ModelCost, layers: float, head: float) -> ModelCost:
    """Add a number of forward passes of layers, and of output layer and loss, to the backward pass."""
    backward = cost.backward + cost.forward.scaled(layers) if layers else cost.backward
    return replace(cost, backward=backward, head_backward=cost.head_backward + head * cost.head_forward)


def with_score_products(cost: ModelCost, in_backward: bool) -> ModelCost:
    """Return the cost of passes that also compute the products of queries and keys for the largest logits.

    ``in_backward``: the backward pass computes all layers once more, and only then measures logits. A forward pass of
    attention has two products per pair of a query and a key, of the widths of keys and of values.
    """
    return _with_scores(cost, cost.forward.a * _score_share(cost.shape), in_backward)


def without_score_products(cost: ModelCost, in_backward: bool) -> ModelCost:
    """Return the cost to which ``with_score_products`` added the products, up to rounding."""
    share = _score_share(cost.shape)
    return _with_scores(cost, -cost.forward.a * (share if in_backward else share / (1 + share)), in_backward)


def _score_share(shape: ModelShape) -> float:
    return shape.head_dim / (shape.head_dim + shape.value_dim)


def _with_scores(cost: ModelCost, a: float, in_backward: bool) -> ModelCost:
    if in_backward:
        return replace(cost, backward=replace(cost.backward, a=cost.backward.a + a))
    return replace(cost, forward=replace(cost.forward, a=cost.forward.a + a))


def with_windows(cost: CostModel, shape: ModelShape) -> CostModel:
    """Return a cost of full attention with the windows of the model."""
    if shape.window is None:
        return cost
    return replace(cost, window=shape.window + 1, window_share=shape.window_share)


def flops_cost(shape: ModelShape) -> CostModel:
    """Return the cost of a model in FLOPs, forward and backward together, with c = g = 0."""
    passes = 1.0 + BACKWARD_PER_FORWARD
    full = CostModel(a=passes * attention_flops_per_square(shape), b=passes * linear_flops_per_token(shape))
    return with_windows(full, shape)


def flops_stage_cost(shape: ModelShape, num_layers: int, has_head: bool = True, tensor_parallel: int = 1) -> StageCost:
    """Return the FLOPs of a pipeline stage of ``num_layers`` layers, on all ``tensor_parallel`` ranks together.

    They include the expansions of latents (``with_expansions``) and, with ``has_head``, the output layer and the layers
    of multi-token prediction.
    """
    vocab, later = (shape.vocab, shape.later_layers) if has_head else (0, 0)
    both = flops_cost(replace(shape.part(num_layers), vocab=vocab, later_layers=later))
    both = with_windows(both, shape)
    forward = both.scaled(1.0 / (1.0 + BACKWARD_PER_FORWARD))
    expansion = (num_layers + later) * expansion_flops(shape, tensor_parallel)
    return StageCost(*with_expansions(forward, forward.scaled(BACKWARD_PER_FORWARD), expansion))


def with_expansions(forward: CostModel, backward: CostModel, cost: float) -> tuple[CostModel, CostModel]:
    """Return the costs of both passes with the repeated expansions of latents.

    The backward pass expands all latents of the forward pass again, a rank's own latents included, and computes two
    matrix products for the gradients of each (``attention/latent.py``). The first expansion of a rank's own latents and
    its two gradient products are already counted as linear work.

    Args:
        forward, backward: costs without repeated expansions.
        cost: cost of one expansion of one token.
    """
    backward = replace(backward, b=backward.b + cost, e=backward.e + (1.0 + BACKWARD_PER_FORWARD) * cost)
    return replace(forward, e=forward.e + cost), backward


def expert_share(shape: ModelShape, num_layers: int, has_head: bool = True) -> float:
    """Return the share of routed experts in the FLOPs of a stage that are linear in tokens; 0 without experts."""
    part = shape.part(num_layers)
    part = replace(part, vocab=shape.vocab if has_head else 0, later_layers=shape.later_layers if has_head else 0)
    num_expert_layers = part.num_expert_layers + part.later_layers * part.later_experts
    routed = num_expert_layers * (part.expert_ffn_hidden - part.shared_ffn_hidden)
    return 2.0 * shape.mlp_matrices * shape.token_width * routed / linear_flops_per_token(part)


def model_flops(shape: ModelShape, lengths: Sequence[int]) -> float:
    """Return the model FLOPs of documents, forward and backward, with causal attention inside each document.

    ``lengths``: tokens of each document. Recomputation does not count as model FLOPs (PaLM, Chowdhery et al. 2022,
    appendix B, "MFU").
    """
    tokens, cost = np.asarray(lengths, dtype=np.float64), flops_cost(shape)
    return float(cost.a * cost.squares(tokens).sum() + cost.b * tokens.sum())
