"""What is remembered of a layer until its backward pass: kept on the device, swapped to host memory, or recomputed.

One value says it, ``ActivationPlan``. Its shares are of the tokens of a micro-batch, in their order::

    token   0            a             b            s
            |  swapped   |    kept     | recomputed |      a = swap s, b = (1 - recompute) s

Two tensors of a layer are never recomputed, its input and the output of attention: with them everything else is
rebuilt token by token, without attention (MEMO, Zhao et al. 2025, section 4.1). ``activation_policy.py`` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from bytescale_ext.plan.cost import CostModel, ModelCost, ModelShape, linear_flops_per_token

RESIDENT_LAYERS: Final = 2
"""The last layers begin their backward pass at once and are never swapped (MEMO section 4.1, ByteScale Eq. 3)."""

LSE_BYTES: Final = 4
"""The log-sum-exp of attention is a float32 for each token and head."""

LOGIT_BYTES: Final = 6
"""Of one logit while the loss is computed: itself in 16 bits and the float32 copy that becomes its gradient."""


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One tensor that a layer's backward pass needs (MEMO's skeletal activations, section 3.2, Fig. 4).

    Attributes:
        name: what it is.
        kind: "input" is never recomputed; "matrix" is the output of matrix products; "cheap" is rebuilt from another
            tensor by a pass over memory.
        bytes_per_token: on one rank.
        flops_per_token: of the matrix products that rebuild it, on one rank.
        moved_bytes_per_token: of device memory, read and written to rebuild it.
    """

    name: str
    kind: str
    bytes_per_token: float
    flops_per_token: float = 0.0
    moved_bytes_per_token: float = 0.0


def key_value_bytes(shape: ModelShape, tensor_parallel: int = 1, element_bytes: int = 2) -> float:
    """Key and value of one token in one layer on one rank."""
    return 2.0 * shape.num_kv_heads * shape.head_dim * element_bytes / tensor_parallel


def layer_tensors(
    shape: ModelShape,
    element_bytes: int = 2,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    fused_norms: bool = False,
) -> tuple[LayerTensor, ...]:
    """The tensors of one layer on one rank, in the order in which they are made.

    Norm and activation function are taken as fused kernels, which save their input only; the angles of rotary
    embeddings, about one percent, are left out. With ``fused_norms`` a norm and the product behind it are one module
    (TransformerEngine), which saves the norm's output where it cannot be rebuilt without the product: as an input. In a
    model with experts the rows of the MLP are left out: what experts save is left alone on the device, and not counted
    here; the norm before them is always a module of its own.
    """
    into_qkv = "input" if fused_norms else "cheap"
    into_mlp = into_qkv if not shape.num_expert_layers else "cheap"
    whole = shape.hidden * element_bytes / (tensor_parallel if sequence_parallel else 1)
    query = shape.num_heads * shape.head_dim / tensor_parallel
    key_value = 2 * shape.num_kv_heads * shape.head_dim / tensor_parallel
    inner = shape.ffn_hidden / tensor_parallel
    gates = 2 if shape.gated else 1
    width = 2.0 * shape.hidden
    attention = (
        LayerTensor("layer input", "input", whole),
        LayerTensor("input norm output", into_qkv, whole, 0.0, 2 * whole),
        LayerTensor("query, key, value", "matrix", (query + key_value) * element_bytes, width * (query + key_value)),
        LayerTensor("attention output", "input", query * element_bytes),
        LayerTensor("attention log-sum-exp", "input", LSE_BYTES * shape.num_heads / tensor_parallel),
        LayerTensor("residual after attention", "matrix", whole, width * query),
        LayerTensor("MLP norm output", into_mlp, whole, 0.0, 2 * whole),
    )
    if shape.num_expert_layers:
        return attention
    return (
        *attention,
        LayerTensor("MLP first output", "matrix", gates * inner * element_bytes, width * gates * inner),
        LayerTensor("activation output", "cheap", inner * element_bytes, 0.0, (gates + 1) * inner * element_bytes),
    )


@dataclass(frozen=True, slots=True)
class Machine:
    """What one process may use.

    Attributes:
        device_bytes: device memory for activations: what is left beside model states.
        host_bytes: host memory of the arena.
        link_bytes_per_second: between device and pinned host memory, each way.
        memory_bytes_per_second: of device memory.
    """

    device_bytes: float
    host_bytes: float
    link_bytes_per_second: float = 55e9
    memory_bytes_per_second: float = 3.3e12


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """One micro-batch in the layers of one rank.

    Attributes:
        tensors: of one layer.
        num_tokens: of the micro-batch on this rank.
        forward_seconds, backward_seconds: of one layer.
        linear_seconds: forward seconds of the matrix products of one layer.
        linear_flops: of one token in those.
        num_layers: of this rank.
        resident_layers: the last ones, never swapped; 0 on a pipeline stage that is not the last.
        in_flight: micro-batches whose backward pass is still to come, this one included.
        head_bytes: of the logits, beside all layers.
    """

    tensors: tuple[LayerTensor, ...]
    num_tokens: int
    forward_seconds: float
    backward_seconds: float
    linear_seconds: float
    linear_flops: float
    num_layers: int
    resident_layers: int = RESIDENT_LAYERS
    in_flight: int = 1
    head_bytes: float = 0.0

    def bytes_of(self, *kinds: str) -> float:
        """Bytes of the tensors of these kinds in one layer, or of all."""
        return self.num_tokens * sum(
            tensor.bytes_per_token for tensor in self.tensors if not kinds or tensor.kind in kinds
        )

    def rebuild_seconds(self, tensor: LayerTensor, machine: Machine) -> float:
        """To rebuild a tensor for all tokens; infinite for one that is never recomputed."""
        if tensor.kind == "input":
            return math.inf
        products = self.linear_seconds * tensor.flops_per_token / self.linear_flops
        return products + self.num_tokens * tensor.moved_bytes_per_token / machine.memory_bytes_per_second

    def price(self, tensor: LayerTensor, machine: Machine) -> float:
        """Seconds to rebuild one byte of a tensor."""
        return self.rebuild_seconds(tensor, machine) / (self.num_tokens * tensor.bytes_per_token)

    def rebuild_seconds_of(self, kind: str, machine: Machine) -> float:
        """To rebuild all tensors of a kind for all tokens of one layer."""
        return sum(self.rebuild_seconds(tensor, machine) for tensor in self.tensors if tensor.kind == kind)

    @property
    def working_bytes(self) -> float:
        """Gradients that exist together while a layer's backward pass runs: of its widest tensor, and two of its input.

        The gradient of the activation's output takes the place of that output, which has been used by then.
        """
        widest = max(tensor.bytes_per_token for tensor in self.tensors)
        return self.num_tokens * (widest + 2 * self.tensors[0].bytes_per_token)


def layer_load(
    cost: ModelCost,
    length: int,
    width: int = 1,
    *,
    num_layers: int | None = None,
    element_bytes: int = 2,
    sequence_parallel: bool = False,
    fused_norms: bool = False,
    loss_tokens: int | None = None,
) -> LayerLoad:
    """A sequence of ``length`` tokens on each of ``width`` ranks.

    Args:
        cost: of the model on this hardware.
        length: tokens of the sequence.
        width: ranks of its ring.
        num_layers: layers of the rank; None: all.
        element_bytes: of one element of an activation.
        sequence_parallel: norms are shared out over the tensor-parallel ranks.
        fused_norms: see ``layer_tensors``.
        loss_tokens: tokens whose logits exist together (``--chunked-cross-entropy``); None: all.
    """
    return load_of_tokens(
        cost,
        -(-length // width),
        cost.forward.sequence_cost(length, width) + cost.forward.g,
        cost.backward.sequence_cost(length, width) + cost.backward.g,
        num_layers=num_layers,
        element_bytes=element_bytes,
        sequence_parallel=sequence_parallel,
        fused_norms=fused_norms,
        loss_tokens=loss_tokens,
    )


def load_of_tokens(
    cost: ModelCost,
    num_tokens: int,
    forward_seconds: float,
    backward_seconds: float,
    *,
    num_layers: int | None = None,
    element_bytes: int = 2,
    sequence_parallel: bool = False,
    fused_norms: bool = False,
    loss_tokens: int | None = None,
) -> LayerLoad:
    """Any micro-batch of ``num_tokens`` on a rank, by the seconds of one layer; the others as in ``layer_load``."""
    ranks = cost.tensor_parallel
    head = 2 * cost.shape.hidden * cost.shape.vocab
    logits = num_tokens if loss_tokens is None else min(loss_tokens, num_tokens)
    return LayerLoad(
        tensors=layer_tensors(cost.shape, element_bytes, ranks, sequence_parallel, fused_norms),
        num_tokens=num_tokens,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        linear_seconds=cost.forward.linear_cost(num_tokens),
        linear_flops=(linear_flops_per_token(cost.shape) - head) / cost.shape.num_layers / ranks,
        num_layers=cost.shape.num_layers if num_layers is None else num_layers,
        head_bytes=float(LOGIT_BYTES * logits * cost.shape.vocab / ranks),
    )


def cost_of_rates(
    shape: ModelShape,
    linear_flops: float,
    attention_forward_flops: float,
    attention_backward_flops: float,
    tensor_parallel: int = 1,
) -> ModelCost:
    """The cost of a model on a device that was not profiled, from its FLOPs per second in three kinds of work.

    Tensor-parallel ranks share the work evenly; their collectives are not counted.

    Causal attention of s tokens is ``2 s^2 head_dim num_heads`` FLOPs forward and 2.5 times that backward
    (FlashAttention-2, Dao 2023, section 4.1).
    """
    head = 2.0 * shape.hidden * shape.vocab / tensor_parallel
    layer = (linear_flops_per_token(shape) / tensor_parallel - head) / shape.num_layers
    attention = 2.0 * shape.num_heads * shape.head_dim / tensor_parallel
    tensors = layer_tensors(shape, tensor_parallel=tensor_parallel)
    return ModelCost(
        shape=shape,
        device="a device of given FLOPs per second",
        dtype="bfloat16",
        tensor_parallel=tensor_parallel,
        source="given rates",
        forward=CostModel(a=attention / attention_forward_flops, b=layer / linear_flops),
        backward=CostModel(a=2.5 * attention / attention_backward_flops, b=2 * layer / linear_flops),
        head_forward=head / linear_flops,
        head_backward=2 * head / linear_flops,
        layer_bytes=sum(tensor.bytes_per_token for tensor in tensors),
        recompute_bytes=tensors[0].bytes_per_token,
    )


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """What becomes of the tensors of every layer; see the module for the order of the tokens.

    Attributes:
        policy: who made it, one of ``activation_policy.POLICIES`` or "shares" for given ones.
        swap: share of the tokens whose tensors are swapped, but for those of kind "input".
        recompute: share of the tokens whose tensors are recomputed.
        input_swap: share of the tensors of kind "input" that is swapped; the rest of them is kept.
        rebuild_cheap: tensors of kind "cheap" are rebuilt for all tokens, and neither kept nor swapped.
        resident_layers: the last layers, of which everything is kept.
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
                raise ValueError(f"the {name} fraction is {share:g}; it is a share of the tokens, from 0 to 1")
        if self.swap + self.recompute > 1.0 + 1e-9:
            raise ValueError(
                f"the swap fraction {self.swap:g} and the recompute fraction {self.recompute:g} sum to more than 1; "
                "what neither swaps nor recomputes is kept"
            )

    @property
    def keep(self) -> float:
        """Share of the tokens whose tensors stay on the device."""
        return max(0.0, 1.0 - self.swap - self.recompute)

    @property
    def is_off(self) -> bool:
        """Nothing is swapped or recomputed."""
        return not (self.swap or self.recompute or self.input_swap or self.rebuild_cheap)

    def shares(self, tensor: LayerTensor) -> tuple[float, float, float]:
        """(swapped, kept, recomputed) shares of a tensor in a layer that is not resident."""
        if tensor.kind == "input":
            return self.input_swap, 1.0 - self.input_swap, 0.0
        if tensor.kind == "cheap" and self.rebuild_cheap:
            return 0.0, 0.0, 1.0
        return self.swap, self.keep, self.recompute
