"""Input of an activation policy: one micro-batch in the layers of a rank, and the memory and link that it may use."""

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
    widest_bytes,
)
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND, ModelCost, with_expansions
from bytescale_ext.plan.cost.model_shape import ModelShape, expansion_flops, layer_flops_per_token

RESIDENT_LAYERS: Final = 2
"""Number of last layers that are never swapped, because their backward pass starts immediately (MEMO section 4.1,
ByteScale Eq. 3)."""

COLLECTIVES_OF_A_LAYER: Final = 4
"""Collectives of the hidden states in one pass of a layer: gathers and scattering reductions. An all-reduce is two."""

COLLECTIVE_BYTES_PER_SECOND: Final = 300e9
"""Bytes that each tensor-parallel rank receives in a second, without a cost file.

Two thirds of an H200's NVLink, which has 450 GB/s in each direction.
"""

MEMORY_BYTES_PER_SECOND: Final = 3.3e12
"""Speed of device memory that is not given; an H100 has 3.35e12."""

LATER_STATES: Final = 5
"""Hidden states that a layer of multi-token prediction saves in addition to a plain layer: the later token's embedding,
two normed states side by side, and its output before and after the last norm."""

LATER_NORMS: Final = 3
"""Norms of a layer of multi-token prediction outside of its transformer layer: of both inputs, and of its output."""

LOGIT_BYTES: Final = 6
"""Bytes of one logit during the loss: 16 bits, and a float32 copy that becomes its gradient."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and bandwidth of one process.

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
    """Settings of the layers of a rank.

    Attributes:
        num_layers: layers of the rank; None: all layers of the model.
        resident_layers: the last layers, which are never swapped; 0 on a pipeline stage that is not the last.
        in_flight: micro-batches before their backward pass, this micro-batch included.
        element_bytes: bytes of one element of an activation.
        sequence_parallel: tensor-parallel ranks share the norms.
        operators: the fused operators of a layer.
        loss_tokens: tokens with logits at the same time (``--chunked-cross-entropy``); None: all.
        slices: held tokens and bytes at each slice of a stage, or at each chunk of virtual stages in the mean of the
            chunks; empty if micro-batches run whole, and ``in_flight`` counts them.
        expert_load: tokens at the experts of this rank, over their number in an even spread.
        expert_ranks: ranks that share the experts of a layer.
        virtual: the stage runs virtual stages, with messages during their passes.
        later_layers: layers of multi-token prediction after the other layers. No policy changes them.
        received: inputs of a token that the stage, or its virtual stages, receive from other stages.
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
    later_layers: int = 0
    received: int = 0

    def experts_of(self, shape: ModelShape) -> tuple[int, bool]:
        """Return the experts of a rank, and whether their activation functions are split."""
        return max(1, shape.num_experts // self.expert_ranks), shape.gated and self.operators.split_activation

    @property
    def key_host_bytes(self) -> float:
        """Peak host memory of swapped keys in these layers, in bytes."""
        return (self.num_layers or 0) * max((moment.in_host for moment in self.slices), default=0.0)


@dataclass(frozen=True, slots=True)
class HeldSlices:
    """Held tokens and bytes of a pipeline stage, in each layer, while it runs one slice.

    Attributes:
        running: tokens of this slice.
        tokens: tokens of all slices before their backward pass, this slice included.
        bytes: bytes of the keys and values of these tokens, of kept keys of other ranks, and of the sums of key
            gradients. No policy moves them.
        gathered: bytes of the keys and values that attention of this slice joins, and of their gradients, in the layer
            that runs.
        read: bytes of swapped keys in the layer that runs and in the layer that is read ahead, together.
        in_host: bytes of swapped keys in host memory.
        head: bytes behind the last layer, once, of the other slices before their backward pass.
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
        tensors: tensors of one layer.
        num_tokens: tokens of the micro-batch on this rank.
        forward_seconds, backward_seconds: seconds of one layer.
        linear_seconds: forward seconds of the matrix products of one layer. They include collectives that were not
            measured separately.
        linear_flops: FLOPs of one token in these products.
        num_layers: layers of this rank.
        resident_layers, in_flight: see ``LayerSettings``.
        head_bytes: bytes of the logits.
        slices: see ``LayerSettings``.
        seconds_per_received_byte: seconds of the collectives of tensor parallelism for each received byte.
        expert_bytes: bytes of a token in the experts of a layer. No policy moves them.
        expert_working_bytes: bytes of a token's gradients in the backward pass of experts.
        later_layers: see ``LayerSettings``.
        later_bytes: bytes of a token in all these layers, without experts.
        beside_bytes: bytes of a running token's hidden states that exist during its passes, in addition to tensors.
        received_bytes: bytes of a token's inputs from other stages. Megatron's schedules hold them until the backward
            pass, also if a policy moves the first layer's input.
        moments: held tokens and bytes of a layer at each possible peak; tensors of experts count as held bytes.
        working_bytes: bytes of gradients that exist together in a layer's backward pass: one gradient of its widest
            tensor and two of its input. The gradient of the activation function's output reuses that output's memory.
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
    received_bytes: float = 0.0
    later_layers: int = 0
    later_bytes: float = 0.0
    moments: tuple[HeldSlices, ...] = field(init=False, repr=False, compare=False)
    working_bytes: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        held = self.slices or (HeldSlices(self.num_tokens, self.in_flight * self.num_tokens, 0.0),)
        if self.expert_bytes:
            held = tuple(replace(moment, bytes=moment.bytes + moment.tokens * self.expert_bytes) for moment in held)
        widest = widest_bytes(self.tensors) + 2 * self.tensors[0].bytes_per_token
        object.__setattr__(self, "moments", held)
        object.__setattr__(self, "working_bytes", self.num_tokens * widest)

    @property
    def times_held(self) -> float:
        """The most tokens of all micro-batches or slices in flight, over the tokens of this micro-batch."""
        return max(moment.tokens for moment in self.moments) / self.num_tokens

    @property
    def later_gradient(self) -> float:
        """Bytes of the gradient of a running token's states: of the model, and of each depth of later tokens."""
        return (1 + self.later_layers) * self.tensors[0].bytes_per_token if self.later_layers else 0.0

    @property
    def whole_bytes(self) -> float:
        """Bytes of one layer that keeps all its tensors, without keys that slices hold."""
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


def later_state_bytes(hidden_bytes: float, element_bytes: int, operators: LayerOperators) -> float:
    """Return the bytes of a token that a layer of multi-token prediction saves in addition to a plain layer.

    ``hidden_bytes``: bytes of a hidden state on this rank.
    """
    norms = operators.norm_bytes(hidden_bytes / element_bytes, element_bytes)
    return LATER_STATES * hidden_bytes + LATER_NORMS * norms


def layer_load(cost: ModelCost, length: int, settings: LayerSettings, width: int = 1) -> LayerLoad:
    """Return the load of a sequence of ``length`` tokens on each of the ``width`` ranks of its ring."""
    return load_of_tokens(cost, -(-length // width), *layer_seconds(cost, length, width), settings)


def layer_seconds(cost: ModelCost, length: int, width: int = 1) -> tuple[float, float]:
    """Return the seconds of one layer for a sequence on ``width`` ranks: forward, backward."""
    forward, backward = (float(part.sequence_cost(length, width)) + part.g for part in _layer_costs(cost))
    return forward, backward


def _layer_costs(cost: ModelCost) -> tuple[CostModel, CostModel]:
    """Return the forward and backward cost of one layer, the mean of layers with windows and without."""
    layer = cost.stage(1)
    return layer.forward, layer.backward


def load_of_tokens(
    cost: ModelCost,
    num_tokens: int,
    forward_seconds: float,
    backward_seconds: float,
    settings: LayerSettings,
) -> LayerLoad:
    """Return the load of any micro-batch of ``num_tokens`` tokens on a rank, given the seconds of one layer."""
    ranks = cost.tensor_parallel
    received = COLLECTIVES_OF_A_LAYER * received_bytes(cost.shape, ranks, settings.element_bytes)
    collectives = num_tokens * received * cost.collective
    shared = cost.shape, ranks, settings.element_bytes, settings.sequence_parallel
    later = settings.later_layers
    logits = num_tokens * (1 + later) if settings.loss_tokens is None else min(settings.loss_tokens, num_tokens)
    tensors = layer_tensors(
        cost.shape,
        settings.element_bytes,
        ranks,
        settings.sequence_parallel,
        settings.operators,
        any(moment.bytes for moment in settings.slices),
    )
    of_later = sum(tensor.bytes_per_token for tensor in tensors)
    of_later += later_state_bytes(tensors[0].bytes_per_token, settings.element_bytes, settings.operators)
    return LayerLoad(
        tensors=tensors,
        num_tokens=num_tokens,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        linear_seconds=max(0.0, cost.forward.linear_cost(num_tokens) - collectives),
        linear_flops=layer_flops_per_token(cost.shape) / ranks,
        num_layers=cost.shape.num_layers if settings.num_layers is None else settings.num_layers,
        resident_layers=settings.resident_layers,
        in_flight=settings.in_flight,
        head_bytes=float(LOGIT_BYTES * logits * cost.shape.vocab / ranks),
        seconds_per_received_byte=cost.collective,
        slices=settings.slices,
        expert_bytes=expert_bytes(cost.shape, settings.element_bytes, ranks, settings.expert_load, settings.operators),
        expert_working_bytes=expert_working_bytes(
            cost.shape,
            settings.element_bytes,
            settings.expert_ranks > 1,
            settings.expert_load,
            *settings.experts_of(cost.shape),
        ),
        later_layers=later,
        later_bytes=later * of_later,
        beside_bytes=gathered_bytes(*shared) + VIRTUAL_MESSAGES * settings.virtual * message_bytes(*shared),
        received_bytes=settings.received * message_bytes(*shared),
    )


def full_load(
    cost: ModelCost, num_tokens: int, length: int, settings: LayerSettings, slices: Sequence[int] = (1,)
) -> LayerLoad:
    """Return the load of the largest micro-batch, or slice of one: tokens of the longest sequence.

    The sequence is on as many ranks as it needs, and its slices are assumed to be equal in time.

    Args:
        cost: costs of the model.
        num_tokens: tokens of the micro-batch on one rank.
        length: tokens of the longest sequence.
        settings: layer settings of the rank.
        slices: tokens of each slice, or numbers in the same proportion.
    """
    width = -(-length // num_tokens)
    sequences = max(1, num_tokens // length) / len(slices)
    forward, backward = (
        sequences * part.sequence_cost(min(length, num_tokens * width), width) + part.g for part in _layer_costs(cost)
    )
    return load_of_tokens(cost, -(-num_tokens * max(slices) // sum(slices)), forward, backward, settings)


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
