"""The input of an activation policy: one micro-batch in the layers of a rank, and the memory and link it may use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.activation.tensors import (
    VIRTUAL_MESSAGES,
    LayerTensor,
    expert_bytes,
    expert_working_bytes,
    gathered_bytes,
    layer_tensors,
    message_bytes,
    received_bytes,
)
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND, ModelCost, with_expansions
from bytescale_ext.plan.cost.model_shape import ModelShape, expansion_flops, layer_flops_per_token

RESIDENT_LAYERS: Final = 2
"""The last layers start their backward pass at once and are never swapped (MEMO section 4.1, ByteScale Eq. 3)."""

COLLECTIVES_OF_A_LAYER: Final = 4
"""Gathers, and reductions that scatter, of the hidden states in one pass of a layer; an all-reduce is two."""

COLLECTIVE_BYTES_PER_SECOND: Final = 300e9
"""Received by each tensor-parallel rank, without a cost file: two thirds of an H200's NVLink, 450 GB/s each way."""

MEMORY_BYTES_PER_SECOND: Final = 3.3e12
"""Of device memory, where it is not given; an H100 has 3.35e12."""

LOGIT_BYTES: Final = 6
"""Bytes of one logit during the loss: 16 bits, and a float32 copy that becomes its gradient."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The memory and bandwidth of one process.

    Attributes:
        device_bytes: device memory for activations, in addition to model states.
        host_bytes: host memory for activations.
        link_bytes_per_second: speed between device and pinned host memory, one way.
        memory_bytes_per_second: speed of device memory.
        state_bytes: device memory of model states, which messages add to name the memory of the whole device.
    """

    device_bytes: float
    host_bytes: float
    link_bytes_per_second: float = LINK_BYTES_PER_SECOND
    memory_bytes_per_second: float = MEMORY_BYTES_PER_SECOND
    state_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """How a rank runs its layers.

    Attributes:
        num_layers: layers of the rank; None: all layers of the model.
        resident_layers: the last layers, which are never swapped; 0 on a pipeline stage that is not the last.
        in_flight: micro-batches whose backward pass is still to come, including this one.
        element_bytes: of one element of an activation.
        sequence_parallel: tensor-parallel ranks share the norms.
        operators: of a layer.
        loss_tokens: tokens whose logits exist together (``--chunked-cross-entropy``); None: all.
        slices: what a stage holds while it runs each of its slices, or each chunk of virtual stages, in the chunks'
            mean; empty where ``in_flight`` says it all.
        expert_load: how many times the tokens of an even spread the experts of this rank get.
        expert_ranks: ranks that share the experts of a layer.
        virtual: the stage runs virtual stages, with messages beside their passes.
    """

    num_layers: int | None = None
    resident_layers: int = RESIDENT_LAYERS
    in_flight: int = 1
    element_bytes: int = 2
    sequence_parallel: bool = False
    operators: LayerOperators = FUSED
    loss_tokens: int | None = None
    slices: tuple[HeldSlices, ...] = ()
    expert_load: float = 1.0
    expert_ranks: int = 1
    virtual: bool = False

    @property
    def key_host_bytes(self) -> float:
        """The most host memory that swapped keys take in these layers."""
        return (self.num_layers or 0) * max((moment.in_host for moment in self.slices), default=0.0)


@dataclass(frozen=True, slots=True)
class HeldSlices:
    """What a pipeline stage holds in each layer while it runs one slice.

    Attributes:
        running: tokens of this slice.
        tokens: of the slices whose backward pass is still to come, this one included.
        bytes: of their keys and values, of the keys kept of other ranks, and of the sums of key gradients. No policy
            moves them.
        gathered: bytes of the keys and values that attention of this slice joins, and of their gradients, in the one
            layer that runs.
        read: bytes of swapped keys in the layer that runs and the one that is read ahead, together.
        in_host: bytes of swapped keys in host memory.
        head: bytes behind the last layer, once, of the other slices whose backward pass is still to come.
    """

    running: float
    tokens: float
    bytes: float
    gathered: float = 0.0
    read: float = 0.0
    in_host: float = 0.0
    head: float = 0.0


@dataclass(frozen=True, slots=True)
class LayerLoad:
    """One micro-batch in the layers of one rank.

    Attributes:
        tensors: of one layer.
        num_tokens: of the micro-batch on this rank.
        forward_seconds, backward_seconds: of one layer.
        linear_seconds: forward seconds of the matrix products of one layer, and where collectives were not measured by
            themselves, of these too.
        linear_flops: of one token in these products.
        num_layers: of this rank.
        resident_layers, in_flight: see ``LayerSettings``.
        head_bytes: of the logits.
        slices: see ``LayerSettings``.
        seconds_per_received_byte: of the collectives of tensor parallelism.
        expert_bytes: of a token in the experts of a layer. No policy moves them.
        expert_working_bytes: of the gradients of a token in the backward pass of experts.
        beside_bytes: of a token that runs, hidden states that exist beside its passes.
        moments: what a layer holds at each moment at which it may hold most; its experts' tensors count as held bytes.
        working_bytes: gradients that exist together in a layer's backward pass: one of its widest tensor, and two of
            its input. The gradient of the activation function's output reuses the memory of that output.
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
    seconds_per_received_byte: float = 0.0
    slices: tuple[HeldSlices, ...] = ()
    expert_bytes: float = 0.0
    expert_working_bytes: float = 0.0
    beside_bytes: float = 0.0
    moments: tuple[HeldSlices, ...] = field(init=False, repr=False, compare=False)
    working_bytes: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held = self.slices or (HeldSlices(self.num_tokens, self.in_flight * self.num_tokens, 0.0),)
        if self.expert_bytes:
            held = tuple(replace(one, bytes=one.bytes + one.tokens * self.expert_bytes) for one in held)
        widest = max(tensor.bytes_per_token for tensor in self.tensors)
        object.__setattr__(self, "moments", held)
        object.__setattr__(self, "working_bytes", self.num_tokens * (widest + 2 * self.tensors[0].bytes_per_token))

    @property
    def times_held(self) -> float:
        """Tokens of all micro-batches or slices in flight, at most, over those of this one."""
        return max(moment.tokens for moment in self.moments) / self.num_tokens

    @property
    def whole_bytes(self) -> float:
        """One layer that keeps all its tensors, without keys that slices hold."""
        return self.bytes_of() - self.bytes_of("key")

    def bytes_of(self, *kinds: str) -> float:
        """Return the bytes of the tensors of these kinds in one layer; without kinds, of all tensors."""
        return self.num_tokens * sum(
            tensor.bytes_per_token for tensor in self.tensors if not kinds or tensor.kind in kinds
        )

    def rebuild_seconds(self, tensor: LayerTensor, machine: Machine) -> float:
        """Return the seconds to rebuild a tensor for all tokens; infinite for kind "input"."""
        if tensor.kind == "input":
            return math.inf
        products = self.linear_seconds * tensor.flops_per_token / self.linear_flops
        collectives = tensor.received_bytes_per_token * self.seconds_per_received_byte
        return products + self.num_tokens * (
            tensor.moved_bytes_per_token / machine.memory_bytes_per_second + collectives
        )

    def price(self, tensor: LayerTensor, machine: Machine) -> float:
        """Return the seconds to rebuild one byte of a tensor."""
        return self.rebuild_seconds(tensor, machine) / (self.num_tokens * tensor.bytes_per_token)

    def rebuild_seconds_of(self, kind: str, machine: Machine) -> float:
        """Return the seconds to rebuild all tensors of a kind in one layer, for all tokens."""
        return sum(self.rebuild_seconds(tensor, machine) for tensor in self.tensors if tensor.kind == kind)

    def working_bytes_at(self, moment: HeldSlices) -> float:
        """Return the gradients that exist together at a moment: in the MLP, or in attention over earlier slices."""
        share = moment.running / self.num_tokens
        in_attention = 3 * moment.running * self.tensors[0].bytes_per_token + moment.gathered
        return max(share * self.working_bytes, in_attention if moment.gathered else 0.0)


def layer_load(cost: ModelCost, length: int, width: int = 1, how: LayerSettings | None = None) -> LayerLoad:
    """Return the load of a sequence of ``length`` tokens on each of the ``width`` ranks of its ring."""
    forward, backward = (part.sequence_cost(length, width) + part.g for part in _layer_costs(cost))
    return load_of_tokens(cost, -(-length // width), forward, backward, how)


def _layer_costs(cost: ModelCost) -> tuple[CostModel, CostModel]:
    """Return the forward and backward cost of one layer, the mean of those with windows and those without."""
    layer = cost.stage(1)
    return layer.forward, layer.backward


def load_of_tokens(
    cost: ModelCost,
    num_tokens: int,
    forward_seconds: float,
    backward_seconds: float,
    how: LayerSettings | None = None,
) -> LayerLoad:
    """Return the load of any micro-batch of ``num_tokens`` tokens on a rank, given the seconds of one layer."""
    how = how or LayerSettings()
    ranks = cost.tensor_parallel
    received = COLLECTIVES_OF_A_LAYER * received_bytes(cost.shape, ranks, how.element_bytes)
    collectives = num_tokens * received * cost.collective
    shared = cost.shape, ranks, how.element_bytes, how.sequence_parallel
    logits = num_tokens if how.loss_tokens is None else min(how.loss_tokens, num_tokens)
    return LayerLoad(
        tensors=layer_tensors(
            cost.shape,
            how.element_bytes,
            ranks,
            how.sequence_parallel,
            how.operators,
            any(moment.bytes for moment in how.slices),
        ),
        num_tokens=num_tokens,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        linear_seconds=max(0.0, cost.forward.linear_cost(num_tokens) - collectives),
        linear_flops=layer_flops_per_token(cost.shape) / ranks,
        num_layers=cost.shape.num_layers if how.num_layers is None else how.num_layers,
        resident_layers=how.resident_layers,
        in_flight=how.in_flight,
        head_bytes=float(LOGIT_BYTES * logits * cost.shape.vocab / ranks),
        seconds_per_received_byte=cost.collective,
        slices=how.slices,
        expert_bytes=expert_bytes(cost.shape, how.element_bytes, ranks, how.expert_load),
        expert_working_bytes=expert_working_bytes(cost.shape, how.element_bytes, how.expert_ranks > 1, how.expert_load),
        beside_bytes=gathered_bytes(*shared) + VIRTUAL_MESSAGES * how.virtual * message_bytes(*shared),
    )


def full_load(
    cost: ModelCost, num_tokens: int, length: int, how: LayerSettings, slices: Sequence[int] = (1,)
) -> LayerLoad:
    """Return the load of the largest micro-batch, or slice of one: tokens of the longest sequence.

    The sequence is on as many ranks as it needs, and its slices are assumed to be equal in time.

    Args:
        cost: of the model.
        num_tokens: of the micro-batch on one rank.
        length: tokens of the longest sequence.
        how: see ``LayerSettings``.
        slices: their tokens, or their proportion.
    """
    width = -(-length // num_tokens)
    sequences = max(1, num_tokens // length) / len(slices)
    forward, backward = (
        sequences * part.sequence_cost(min(length, num_tokens * width), width) + part.g for part in _layer_costs(cost)
    )
    return load_of_tokens(cost, -(-num_tokens * max(slices) // sum(slices)), forward, backward, how)


def cost_of_rates(
    shape: ModelShape,
    linear_flops: float,
    attention_forward_flops: float,
    attention_backward_flops: float,
    tensor_parallel: int = 1,
    *,
    collective: float | None = None,
) -> ModelCost:
    """Return the cost of a model on a device that was not profiled, from its FLOPs per second in three kinds of work.

    Tensor-parallel ranks share the work evenly and wait for their collectives, which take ``collective`` seconds for
    each byte received in each direction of a layer; None: ``COLLECTIVE_BYTES_PER_SECOND``. Causal attention of s tokens
    takes ``2 s^2 head_dim num_heads`` FLOPs forward and 2.5 times as many backward (FlashAttention-2, Dao 2023, section
    4.1).
    """
    head = 2.0 * shape.hidden * shape.vocab / tensor_parallel
    layer = layer_flops_per_token(shape) / tensor_parallel
    attention = shape.num_heads * (shape.head_dim + shape.value_dim) / tensor_parallel
    tensors = layer_tensors(shape, tensor_parallel=tensor_parallel)
    if collective is None:
        collective = 1.0 / COLLECTIVE_BYTES_PER_SECOND if tensor_parallel > 1 else 0.0
    expansion = expansion_flops(shape, tensor_parallel) / tensor_parallel / linear_flops
    waiting = COLLECTIVES_OF_A_LAYER * received_bytes(shape, tensor_parallel) * collective
    forward, backward = with_expansions(
        CostModel(a=attention / attention_forward_flops, b=layer / linear_flops + waiting),
        CostModel(a=2.5 * attention / attention_backward_flops, b=2 * layer / linear_flops + waiting),
        expansion,
    )
    return ModelCost(
        shape=shape,
        device="a device of given FLOPs per second",
        dtype="bfloat16",
        tensor_parallel=tensor_parallel,
        source="given rates",
        forward=forward,
        backward=backward,
        head_forward=head / linear_flops,
        head_backward=2 * head / linear_flops,
        layer_bytes=sum(tensor.bytes_per_token for tensor in tensors),
        recompute_bytes=tensors[0].bytes_per_token,
        collective=collective,
    )
