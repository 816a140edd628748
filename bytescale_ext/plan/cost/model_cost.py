"""The cost of one model: in seconds from a cost file, or in FLOPs from its sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
"""Between a GPU and pinned host memory over PCIe 5, one way, where it is not given."""

NOT_IN_FILES: Final = ("nodes", "window", "window_share", "e")
"""Fields of ``CostModel`` that belong to a run, not to a cost file; measured rings have ``e`` in ``h``."""

WINDOWS: Final = ("num_window_layers", "window_tokens", "later_layers", "later_experts")
"""Fields of ``ModelShape`` that cost files leave out: their costs are those of one layer with full attention."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Costs of one model on one device, in seconds and bytes: the content of a cost file.

    Attributes:
        shape: the measured model; the file is refused for any other model.
        device: the hardware, in words.
        dtype: parameter type, for example "bfloat16".
        tensor_parallel: ranks that share each layer.
        source: where the constants are from: a measurement, or a paper with figure and equation.
        forward, backward: of one layer on one rank. ``g`` is the fixed cost of a layer for each micro-batch.
        head_forward, head_backward: seconds per token of embedding, output layer and loss together.
        layer_bytes: activations that one token keeps in one layer until its backward pass.
        recompute_bytes: the same with full recompute (the layer's input).
        collective: seconds for each byte that a rank receives in collectives of its node or, with tensor parallelism,
            of its tensor-parallel group; then ``forward`` and ``backward`` include them. 0: not measured by themselves.
        latency: seconds that such a collective, or a message, of a few bytes takes; 0: not measured.
        slowdown: a rank receives a byte from another node in this many times the time from its own node, of which the
            ``c`` of both passes is. 1: there is one node, or links between nodes were not measured by themselves.
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
        """Bytes of one element of a parameter or an activation."""
        return 4 if self.dtype == "float32" else 2

    def stage(self, num_layers: int, has_head: bool = False, link: float = LINK_BYTES_PER_SECOND) -> StageCost:
        """Return the cost of a stage of ``num_layers`` layers; ``has_head`` adds embedding and output layer.

        It also adds layers of multi-token prediction, each as a layer and an output layer. Layers with a window count
        as if they were spread evenly over the layers.

        ``link``: bytes per second between the device and host memory, one way, for swapped keys.
        """
        later = self.shape.later_layers if has_head else 0
        passes = (one.scaled(num_layers + later) for one in (self.forward, self.backward))
        forward, backward = (with_windows(one, self.shape) for one in passes)
        if has_head:
            forward = replace(forward, b=forward.b + (1 + later) * self.head_forward)
            backward = replace(backward, b=backward.b + (1 + later) * self.head_backward)
        keys = key_value_bytes(self.shape, self.tensor_parallel, self.element_bytes)
        return StageCost(forward, backward, num_layers * keys / link)

    def nodes(self, cluster: Cluster) -> Nodes | None:
        """Return the nodes of a cluster with slower links between them, or None where nothing says so."""
        if cluster.ranks_per_node is None or self.slowdown <= 1.0:
            return None
        return Nodes(cluster.node_ranks, self.slowdown, cluster.hierarchical_rings != "off")

    def whole(self) -> StageCost:
        """Return the cost of the whole model on one rank."""
        return self.stage(self.shape.num_layers, has_head=True)

    def to_json(self) -> dict[str, object]:
        """Return plain dicts: the format of a cost file. It says nothing about the nodes of a run and about windows."""
        value = asdict(self)
        for of, names in (("forward", NOT_IN_FILES), ("backward", NOT_IN_FILES), ("shape", WINDOWS)):
            for name in names:
                del value[of][name]
        if self.shape.latent is None:
            del value["shape"]["latent"]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, object]) -> ModelCost:
        """Invert ``to_json``. Raises ValueError, naming an entry that is missing, unknown or negative."""
        try:
            shape = from_entries(ModelShape, value["shape"])
            if shape.latent is not None:
                shape = replace(shape, latent=from_entries(LatentShape, shape.latent))
            passes = {name: from_entries(CostModel, value[name]) for name in ("forward", "backward")}
            cost = from_entries(cls, {**value, "shape": shape, **passes})
            for name in (*NOT_IN_FILES, *WINDOWS):
                if any(name in entries_of(value[one]) for one in ("forward", "backward", "shape")):
                    raise TypeError(f"{name} is no entry")
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a cost file ({error}); `bytescale profile` writes one") from None
        cost._check()
        return cost

    def _check(self) -> None:
        numbers = {f"{name}.{key}": number for name in ("forward", "backward")
                   for key, number in asdict(getattr(self, name)).items() if key not in NOT_IN_FILES}  # fmt: skip
        for name in (
            "head_forward",
            "head_backward",
            "layer_bytes",
            "recompute_bytes",
            "collective",
            "slowdown",
            "latency",
        ):
            numbers[name] = getattr(self, name)
        for name, number in numbers.items():
            if not isinstance(number, int | float) or not 0 <= number < float("inf"):
                raise ValueError(f"the cost file's {name} is {number}; constants must be numbers of at least 0")
        for name in ("forward.a", "forward.b", "backward.a", "backward.b"):
            if not numbers[name]:
                raise ValueError(f"the cost file's {name} is 0: attention and linear work both cost time")


def with_windows(cost: CostModel, shape: ModelShape) -> CostModel:
    """Return the cost of full attention in all layers as that of a model with its windows."""
    if shape.window is None:
        return cost
    return replace(cost, window=shape.window + 1, window_share=shape.window_share)


def flops_cost(shape: ModelShape) -> CostModel:
    """Return costs in FLOPs, forward and backward, to predict imbalance without measuring (c = g = 0)."""
    passes = 1.0 + BACKWARD_PER_FORWARD
    full = CostModel(a=passes * attention_flops_per_square(shape), b=passes * linear_flops_per_token(shape))
    return with_windows(full, shape)


def flops_stage_cost(shape: ModelShape, num_layers: int, has_head: bool = True, tensor_parallel: int = 1) -> StageCost:
    """Return the FLOPs of a pipeline stage of ``num_layers`` layers, with the output layer or without.

    Those of all ``tensor_parallel`` ranks that share a layer count together; expansions of latents are included
    (``with_expansions``).
    """
    vocab, later = (shape.vocab, shape.later_layers) if has_head else (0, 0)
    both = flops_cost(replace(shape.part(num_layers), vocab=vocab, later_layers=later))
    both = with_windows(both, shape)
    forward = both.scaled(1.0 / (1.0 + BACKWARD_PER_FORWARD))
    one = (num_layers + later) * expansion_flops(shape, tensor_parallel)
    return StageCost(*with_expansions(forward, forward.scaled(BACKWARD_PER_FORWARD), one))


def with_expansions(forward: CostModel, backward: CostModel, cost: float) -> tuple[CostModel, CostModel]:
    """Return the costs of both passes with repeated expansions of latents, one of which costs ``cost`` for a token.

    A backward pass expands again what the forward pass expanded, a rank's own latents too, and has two products for the
    gradients of each (``attention/latent.py``). One forward product of a rank's own latents, and two backward, are
    counted as those of any weight.
    """
    backward = replace(backward, b=backward.b + cost, e=backward.e + (1.0 + BACKWARD_PER_FORWARD) * cost)
    return replace(forward, e=forward.e + cost), backward


def expert_share(shape: ModelShape, num_layers: int, has_head: bool = True) -> float:
    """Return the share of routed experts in the FLOPs of a stage that are linear in tokens; 0 without experts."""
    part = shape.part(num_layers)
    part = replace(part, vocab=shape.vocab if has_head else 0, later_layers=shape.later_layers if has_head else 0)
    num_layers = part.num_expert_layers + part.later_layers * part.later_experts
    routed = num_layers * (part.expert_ffn_hidden - part.shared_ffn_hidden)
    return 2.0 * (3 if shape.gated else 2) * shape.hidden * routed / linear_flops_per_token(part)


def model_flops(shape: ModelShape, lengths: Iterable[int]) -> float:
    """Return forward and backward model FLOPs of whole documents: causal attention inside each, and inside windows.

    Recomputed work is not model FLOPs (PaLM, Chowdhery et al. 2022, appendix B, "MFU").
    """
    tokens, cost = np.fromiter(lengths, dtype=np.float64), flops_cost(shape)
    return float(cost.a * cost.squares(tokens).sum() + cost.b * tokens.sum())
