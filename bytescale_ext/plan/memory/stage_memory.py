"""Device memory of pipeline stages: model states, running passes, and the bytes of a token in a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from bytescale_ext.plan.activation.load import LOGIT_BYTES, LayerSettings, later_state_bytes
from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.activation.tensors import (
    EXPERT_LOAD,
    VIRTUAL_MESSAGES,
    expert_working_bytes,
    gathered_bytes,
    layer_tensors,
    message_bytes,
    widest_bytes,
)
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import KEY_SUM_BYTES, ModelShape, key_value_bytes
from bytescale_ext.plan.memory.model_states import parameter_bytes, stage_parameters
from bytescale_ext.plan.step.sizes import Cluster

Floats = npt.NDArray[np.float64]

SAVED_LOGIT_BYTES: Final = 4
"""Bytes of a logit from the loss to its backward pass, in float32."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one token in one layer.

    Attributes:
        activations: bytes from its forward to its backward pass, with its own key and value.
        keys: bytes of its key and value.
        key_sums: bytes of the sums of key and value gradients over slices.
        head: bytes behind the last layer, once, from its loss to its backward pass (``head_bytes``).
        only_sliced: the part of ``activations`` that only micro-batches in slices hold.
        angles: bytes of its rotary angles. The layers of a (virtual) stage hold them together if they are recomputed.
    """

    activations: float
    keys: float
    key_sums: float
    head: float = 0.0
    only_sliced: float = 0.0
    angles: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape, tensor_parallel: int, element_bytes: int, activations: float = 0.0) -> LayerBytes:
        """Return the bytes of a model's layer on one of ``tensor_parallel`` ranks."""
        keys, sums = (key_value_bytes(shape, tensor_parallel, size) for size in (element_bytes, KEY_SUM_BYTES))
        return cls(activations, keys, sums)


@dataclass(frozen=True, slots=True)
class PassBytes:
    """Bytes of a running pass, in addition to the activations that layers hold from forward to backward pass.

    Attributes:
        num_tokens: tokens of a full micro-batch, C.
        hidden: bytes of a hidden state; three exist together in the backward pass of attention.
        in_mlp: bytes for each token of the pass: gradients that exist together in the MLP or in experts.
        of_keys: bytes for each token to which the pass attends: its key, its value and their gradients.
        logits: bytes for each token of the pass on the last stage.
        loss_tokens: largest number of tokens with logits at the same time.
        buffer: bytes for each token of the largest pass: a hidden state of tensor parallelism that outlives passes.
        message: bytes for each token: its hidden state in a message between stages.
        num_messages: messages of the pass's size that exist during it.
        again: bytes for each token of the pass in the layer that is recomputed.
        later_layers: layers of multi-token prediction on the last stage.
        in_later: bytes for each token that each of them saves in addition to a plain layer.
    """

    num_tokens: float
    hidden: float
    in_mlp: float
    of_keys: float
    logits: float
    loss_tokens: float
    buffer: float = 0.0
    message: float = 0.0
    num_messages: int = 0
    again: float = 0.0
    later_layers: int = 0
    in_later: float = 0.0

    @property
    def of_later(self) -> float:
        """Bytes for each token of layers of multi-token prediction, with the gradient of the states of all depths.

        Recomputed layers keep the later token's embedding, except the layer that runs.
        """
        if not self.later_layers:
            return 0.0
        others = (self.later_layers - 1) * (self.hidden if self.again else self.in_later)
        return self.in_later + others + (1 + self.later_layers) * self.hidden

    def of_loss(self, tokens: Floats) -> Floats:
        """Return the bytes of the loss in forward or backward passes of these tokens. Arrays keep their shape."""
        return np.asarray(np.minimum(tokens, self.loss_tokens) * self.logits)

    def of_backward(self, tokens: Floats, attended: Floats, has_loss: bool) -> Floats:
        """Return the bytes of backward passes of a stage without the buffer. All arrays have the same shape.

        Args:
            tokens: tokens of each pass.
            attended: tokens up to the end of each pass, to which it attends.
            has_loss: whether it is the last stage.
        """
        in_attention = tokens * 3 * self.hidden + attended * self.of_keys
        layer = np.maximum(tokens * self.in_mlp, in_attention) + tokens * self.again
        others = self.num_messages * self.message + (self.of_later if has_loss else 0.0)
        return np.asarray((np.maximum(layer, self.of_loss(tokens)) if has_loss else layer) + tokens * others)

    def of_full(self, num_stages: int) -> tuple[float, ...]:
        """Return the bytes of the backward pass of a full micro-batch on each stage."""
        full = np.array(self.num_tokens)
        stages = (self.of_backward(full, full, stage == num_stages - 1) for stage in range(num_stages))
        return tuple(float(each) + self.num_tokens * self.buffer for each in stages)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Device memory of the stages of a pipeline.

    Attributes:
        layer: bytes of a token in one layer.
        num_layers: layers of each stage.
        state_bytes: bytes of each stage's parameters, gradients and optimizer states.
        working_bytes: bytes of each stage's running backward pass of a full micro-batch: gradients of a layer and its
            recomputed activations, or logits.
        passes: bytes of the passes of other micro-batches; None: ``working_bytes`` hold for all micro-batches.
        rows_multiple: each slice has activations of a multiple of this many rows.
        angle_bytes: bytes of a token's rotary angles, which all layers of a stage use.
        update_bytes: bytes that the update of each stage takes when no activations exist; empty: none.
    """

    layer: LayerBytes
    num_layers: tuple[int, ...]
    state_bytes: tuple[float, ...]
    working_bytes: tuple[float, ...]
    passes: PassBytes | None = None
    rows_multiple: int = 1
    angle_bytes: float = 0.0
    update_bytes: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        cost: ModelCost,
        num_layers: Sequence[int],
        cluster: Cluster,
        settings: LayerSettings,
    ) -> StageMemory:
        """Return the memory of a model whose stages have these layers, with the optimizer shared by all HDP ranks.

        Only these ``settings`` count: bytes of an element, sequence parallelism, operators, tokens of a loss and load
        of experts.
        """
        shape, ranks, tokens = cost.shape, cost.tensor_parallel, cluster.tokens_per_rank
        element_bytes, loss_tokens = settings.element_bytes, settings.loss_tokens
        sequence_parallel = settings.sequence_parallel
        tensors = layer_tensors(shape, element_bytes, ranks)
        layer = LayerBytes.of(shape, ranks, element_bytes, cost.layer_bytes)
        shared = message_bytes(shape, ranks, element_bytes, sequence_parallel)
        exchanged = settings.expert_ranks > 1
        load = max(EXPERT_LOAD, settings.expert_load) if exchanged else settings.expert_load
        in_experts = expert_working_bytes(shape, element_bytes, exchanged, load, *settings.experts_of(shape))
        passes = PassBytes(
            tokens,
            hidden=tensors[0].bytes_per_token,
            in_mlp=max(widest_bytes(tensors) + 2 * shared, in_experts),
            of_keys=2 * layer.keys,
            logits=LOGIT_BYTES * shape.vocab / ranks * (1 if loss_tokens else 1 + shape.later_layers),
            loss_tokens=loss_tokens or math.inf,
            buffer=gathered_bytes(shape, ranks, element_bytes, sequence_parallel),
            message=shared,
            later_layers=shape.later_layers,
            in_later=later_state_bytes(shared, element_bytes, settings.operators),
        )
        of_parameter, last = parameter_bytes(element_bytes, cluster.num_ranks), len(num_layers) - 1
        parameters = (
            stage_parameters(part, ranks, stage == 0, stage == last)
            for stage, part in enumerate(shape.stages(num_layers))
        )
        head = head_bytes(shape, ranks, element_bytes, loss_tokens is not None, settings.operators)
        return cls(
            replace(layer, head=head + passes.later_layers * passes.in_later),
            (*num_layers[:-1], num_layers[-1] + shape.later_layers),
            tuple(of_parameter * count for count in parameters),
            passes.of_full(len(num_layers)),
            passes,
            angle_bytes=settings.operators.angle_bytes,
        )

    def with_virtual_stages(self) -> StageMemory:
        """Return the memory of stages that run virtual stages, with messages during their passes."""
        assert self.passes is not None, f"{self.working_bytes=} are fixed"
        return self._of(replace(self.passes, num_messages=VIRTUAL_MESSAGES))

    def recomputing(self, input_bytes: float, sliced: bool = False, more_bytes: float = 0.0) -> StageMemory:
        """Return the memory of layers that are recomputed one by one.

        Args:
            input_bytes: bytes of a token that each layer keeps.
            sliced: whether micro-batches may run in slices. Layers then also keep keys and values for later slices.
            more_bytes: bytes of a token in addition to the mean activations of a layer, while a layer runs again.
        """
        assert self.passes is not None, f"{self.working_bytes=} are fixed"
        keys = self.layer.keys if sliced else 0.0
        again = replace(self.passes, again=self.layer.activations - input_bytes - keys + more_bytes)
        freed = again.later_layers * (again.in_later - again.hidden)
        layer = replace(
            self.layer,
            activations=input_bytes + keys,
            only_sliced=keys,
            angles=self.angle_bytes,
            head=self.layer.head - freed,
        )
        return replace(self, layer=layer)._of(again)

    def unsliced(self) -> StageMemory:
        """Return the memory of micro-batches that run whole."""
        if not self.layer.only_sliced:
            return self
        assert self.passes is not None
        whole = replace(self.layer, activations=self.layer.activations - self.layer.only_sliced, only_sliced=0.0)
        return replace(self, layer=whole)._of(replace(self.passes, again=self.passes.again + self.layer.only_sliced))

    def _of(self, passes: PassBytes) -> StageMemory:
        return replace(self, passes=passes, working_bytes=passes.of_full(len(self.num_layers)))

    @property
    def buffer_bytes(self) -> float:
        """Bytes for each token of the largest pass that outlive it."""
        return 0.0 if self.passes is None else self.passes.buffer

    def working(self, stage: int, tokens: Floats, attended: Floats) -> tuple[Floats, Floats]:
        """Return the bytes that forward and backward passes of a stage take. All arrays have the same shape.

        Args:
            stage: number of the stage.
            tokens: tokens of each pass.
            attended: tokens up to the end of each pass, to which it attends.
        """
        has_loss = stage == len(self.num_layers) - 1
        if self.passes is None:
            fixed = np.full_like(tokens, self.working_bytes[stage])
            return fixed, fixed
        forward = self.passes.of_loss(tokens) if has_loss else np.zeros_like(tokens)
        return forward, self.passes.of_backward(tokens, attended, has_loss)

    def without_states(self) -> StageMemory:
        """Return the memory without parameters, gradients and optimizer states."""
        return replace(self, state_bytes=(0.0,) * len(self.num_layers), update_bytes=())

    @property
    def stage_updates(self) -> tuple[float, ...]:
        """Bytes that the update of each stage takes."""
        return self.update_bytes or (0.0,) * len(self.num_layers)

    def token_bytes(self, stage: int) -> float:
        """Return the mean bytes of a token in a layer of a stage."""
        return self.layer.activations + self.layer.angles / max(1, self.num_layers[stage])

    def most_bytes(self, layer_bytes: Sequence[float]) -> float:
        """Return the bytes of the fullest stage; ``layer_bytes``: peak bytes in a layer of each stage."""
        stages = zip(
            self.state_bytes, self.stage_updates, self.working_bytes, self.num_layers, layer_bytes, strict=True
        )
        return max(states + max(update, working + layers * each) for states, update, working, layers, each in stages)


def head_bytes(
    shape: ModelShape,
    tensor_parallel: int,
    element_bytes: int,
    chunked_loss: bool,
    operators: LayerOperators = FUSED,
) -> float:
    """Return the bytes of a token after the last layer until its backward pass: two hidden states, and its logits.

    The hidden states are the outputs of the last layer and of the final norm. An unfused final norm saves as much as an
    unfused norm in a layer. Logits are float32; a chunked loss keeps none.
    """
    logits = 0.0 if chunked_loss else SAVED_LOGIT_BYTES * shape.vocab / tensor_parallel * (1 + shape.later_layers)
    return 2.0 * shape.hidden * element_bytes + operators.norm_bytes(shape.hidden, element_bytes) + logits
