"""Device memory of pipeline stages: what each holds whatever it runs, and the bytes of a token in a layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from bytescale_ext.plan.activation.load import LOGIT_BYTES
from bytescale_ext.plan.activation.tensors import EXPERT_LOAD, expert_working_bytes, layer_tensors
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import KEY_SUM_BYTES, ModelShape, key_value_bytes
from bytescale_ext.plan.memory.model_states import parameter_bytes, stage_parameters
from bytescale_ext.plan.step.sizes import Cluster

SAVED_LOGIT_BYTES: Final = 4
"""Of a logit from the loss to its backward pass, in float32."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one token in one layer.

    Attributes:
        activations: from its forward to its backward pass, its own key and value included.
        keys: its key and value.
        key_sums: sums of the gradients of both, over slices.
        head: behind the last layer, once, from its loss to its backward pass (``head_bytes``).
    """

    activations: float
    keys: float
    key_sums: float
    head: float = 0.0

    @classmethod
    def of(cls, shape: ModelShape, tensor_parallel: int, element_bytes: int, activations: float = 0.0) -> LayerBytes:
        """Return the bytes of a model's layer on one of ``tensor_parallel`` ranks."""
        keys, sums = (key_value_bytes(shape, tensor_parallel, size) for size in (element_bytes, KEY_SUM_BYTES))
        return cls(activations, keys, sums)


@dataclass(frozen=True, slots=True)
class PassBytes:
    """What a pass takes besides what layers hold from their forward to their backward pass, in bytes.

    Attributes:
        num_tokens: C, to so many tokens the last slice of a micro-batch attends.
        hidden: of a hidden state; three exist together in the backward pass of attention.
        in_mlp: of a token of the pass, gradients that exist together in the MLP or in experts.
        of_keys: of a token to which the pass attends, its key and value and their gradients.
        logits: of a token of the pass on the last stage.
        loss_tokens: the most tokens whose logits exist together.
        buffers: hidden states that outlive passes, of tensor parallelism and of messages.
        again: of a token of the pass, in the layer that is computed again.
    """

    num_tokens: float
    hidden: float
    in_mlp: float
    of_keys: float
    logits: float
    loss_tokens: float
    buffers: float = 0.0
    again: float = 0.0

    def of_stages(self, num_stages: int, num_tokens: float) -> tuple[float, ...]:
        """Return the bytes on each stage if the largest pass has ``num_tokens`` tokens."""
        in_attention = num_tokens * 3 * self.hidden + self.num_tokens * self.of_keys
        layer = max(num_tokens * self.in_mlp, in_attention) + num_tokens * self.again
        last = max(layer, min(num_tokens, self.loss_tokens) * self.logits)
        return tuple(each + self.buffers for each in (*(layer,) * (num_stages - 1), last))


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Device memory of the stages of a pipeline.

    Attributes:
        layer: bytes of a token in one layer.
        num_layers: of each stage.
        state_bytes: of each stage: parameters, gradients, optimizer states.
        working_bytes: of each stage: gradients of the layer that runs its backward pass, with what is computed again,
            or logits; of full micro-batches, or of the passes given to ``running``.
        passes: from which ``working_bytes`` follow; None: they are fixed.
        rows_multiple: activations of each slice are of a multiple of this many rows.
    """

    layer: LayerBytes
    num_layers: tuple[int, ...]
    state_bytes: tuple[float, ...]
    working_bytes: tuple[float, ...]
    passes: PassBytes | None = None
    rows_multiple: int = 1

    @classmethod
    def of(
        cls,
        cost: ModelCost,
        num_layers: Sequence[int],
        cluster: Cluster,
        element_bytes: int = 2,
        loss_tokens: int | None = None,
        sequence_parallel: bool = False,
    ) -> StageMemory:
        """Return the memory of a model whose stages have these layers, with the optimizer shared by all HDP ranks.

        ``loss_tokens``: whose logits exist together; None: those of a whole micro-batch.
        """
        shape, ranks, tokens = cost.shape, cost.tensor_parallel, cluster.tokens_per_rank
        tensors = [tensor.bytes_per_token for tensor in layer_tensors(shape, element_bytes, ranks)]
        layer = LayerBytes.of(shape, ranks, element_bytes, cost.layer_bytes)
        in_experts = expert_working_bytes(shape, element_bytes, exchanged=True, load=EXPERT_LOAD)
        passes = PassBytes(
            tokens,
            hidden=tensors[0],
            in_mlp=max(max(tensors) + 2 * tensors[0], in_experts),
            of_keys=2 * layer.keys,
            logits=LOGIT_BYTES * shape.vocab / ranks * (1 if loss_tokens else 1 + shape.later_layers),
            loss_tokens=loss_tokens or math.inf,
            buffers=tokens * tensors[0] * (sequence_parallel and ranks > 1),  # what Megatron gathers; it stays
        )
        of_parameter, last = parameter_bytes(element_bytes, cluster.num_ranks), len(num_layers) - 1
        parameters = (
            stage_parameters(part, ranks, stage == 0, stage == last)
            for stage, part in enumerate(shape.stages(num_layers))
        )
        return cls(
            replace(layer, head=head_bytes(shape, ranks, element_bytes, loss_tokens is not None)),
            (*num_layers[:-1], num_layers[-1] + shape.later_layers),
            tuple(of_parameter * count for count in parameters),
            passes.of_stages(len(num_layers), tokens),
            passes,
        )

    def with_virtual_stages(self) -> StageMemory:
        """Return the memory of stages that run chunks: messages, two in each direction, travel beside passes."""
        assert self.passes is not None, f"{self.working_bytes=} are fixed"
        messages = 4 * self.passes.num_tokens * self.passes.hidden
        passes = replace(self.passes, buffers=self.passes.buffers + messages)
        return replace(self, passes=passes).running(passes.num_tokens)

    def recomputed_bytes(self, input_bytes: float, sliced: bool) -> float:
        """Return what a token keeps in a layer that is computed again: ``input_bytes``, and keys for later slices."""
        return input_bytes + (self.layer.keys if sliced else 0.0)

    def recomputing(self, kept_bytes: float, num_tokens: int) -> StageMemory:
        """Return the memory of layers that keep ``kept_bytes`` of a token and are computed again one by one.

        ``num_tokens``: of the micro-batch whose layer is computed again.
        """
        assert self.passes is not None, f"{self.working_bytes=} are fixed"
        again = replace(self.passes, again=self.layer.activations - kept_bytes)
        return replace(self, layer=replace(self.layer, activations=kept_bytes), passes=again).running(num_tokens)

    def running(self, num_tokens: float) -> StageMemory:
        """Return the memory where each pass has at most ``num_tokens``."""
        if self.passes is None:
            return self
        return replace(self, working_bytes=self.passes.of_stages(len(self.num_layers), num_tokens))

    def without_states(self) -> StageMemory:
        """Return the memory besides parameters, gradients and optimizer states."""
        return replace(self, state_bytes=(0.0,) * len(self.num_layers))

    def most_bytes(self, layer_bytes: Sequence[float]) -> float:
        """Return the bytes of the stage that takes most; ``layer_bytes``: the most in a layer of each stage."""
        stages = zip(self.state_bytes, self.working_bytes, self.num_layers, layer_bytes, strict=True)
        return max(states + working + layers * each for states, working, layers, each in stages)


def head_bytes(shape: ModelShape, tensor_parallel: int, element_bytes: int, chunked_loss: bool) -> float:
    """Return what a token holds behind the last layer until its backward pass: two hidden states, and its logits.

    The hidden states are the outputs of the last layer and of the final norm. Logits are float32; a loss in chunks
    keeps none.
    """
    logits = 0.0 if chunked_loss else SAVED_LOGIT_BYTES * shape.vocab / tensor_parallel * (1 + shape.later_layers)
    return 2.0 * shape.hidden * element_bytes + logits
