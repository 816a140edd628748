"""Device memory of pipeline stages: what each holds whatever it runs, and the bytes of a token in a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bytescale_ext.plan.activation.load import LOGIT_BYTES
from bytescale_ext.plan.activation.tensors import EXPERT_LOAD, expert_working_bytes, layer_tensors
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.cost.model_shape import KEY_SUM_BYTES, ModelShape, key_value_bytes
from bytescale_ext.plan.memory.model_states import parameter_bytes, stage_parameters
from bytescale_ext.plan.step.sizes import Cluster


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of one token in one layer.

    Attributes:
        activations: from its forward to its backward pass, its own key and value included.
        keys: its key and value.
        key_sums: sums of the gradients of both, over slices.
    """

    activations: float
    keys: float
    key_sums: float

    @classmethod
    def of(cls, shape: ModelShape, tensor_parallel: int, element_bytes: int, activations: float = 0.0) -> LayerBytes:
        """Return the bytes of a model's layer on one of ``tensor_parallel`` ranks."""
        keys, sums = (key_value_bytes(shape, tensor_parallel, size) for size in (element_bytes, KEY_SUM_BYTES))
        return cls(activations, keys, sums)


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Device memory of the stages of a pipeline.

    Attributes:
        layer: bytes of a token in one layer.
        num_layers: of each stage.
        state_bytes: of each stage: parameters, gradients, optimizer states.
        working_bytes: of each stage: gradients of the layer that runs its backward pass, with what is computed again,
            or logits.
        layer_working: of such a layer's gradients.
        again_bytes: of a token in the layer that is computed again.
        plain_working: where layers are computed again, ``working_bytes`` without that.
        rows_multiple: activations of each slice are of a multiple of this many rows.
    """

    layer: LayerBytes
    num_layers: tuple[int, ...]
    state_bytes: tuple[float, ...]
    working_bytes: tuple[float, ...]
    layer_working: float = 0.0
    again_bytes: float = 0.0
    plain_working: tuple[float, ...] = ()
    rows_multiple: int = 1

    @classmethod
    def of(
        cls,
        cost: ModelCost,
        num_layers: Sequence[int],
        cluster: Cluster,
        element_bytes: int = 2,
        loss_tokens: int | None = None,
    ) -> StageMemory:
        """Return the memory of a model whose stages have these layers, with the optimizer shared by all HDP ranks.

        ``loss_tokens``: whose logits exist together; None: those of a whole micro-batch.
        """
        shape, ranks = cost.shape, cost.tensor_parallel
        tensors = [tensor.bytes_per_token for tensor in layer_tensors(shape, element_bytes, ranks)]
        layer = LayerBytes.of(shape, ranks, element_bytes, cost.layer_bytes)
        in_experts = expert_working_bytes(shape, element_bytes, exchanged=True, load=EXPERT_LOAD)
        of_layer = max(max(tensors) + 2 * tensors[0], 3 * tensors[0] + 2 * layer.keys)
        working = cluster.tokens_per_rank * max(of_layer, in_experts)
        logits = (loss_tokens or cluster.tokens_per_rank) * LOGIT_BYTES * shape.vocab / ranks
        logits *= 1 if loss_tokens else 1 + shape.later_layers
        of_parameter, last = parameter_bytes(element_bytes, cluster.num_ranks), len(num_layers) - 1
        parameters = (
            stage_parameters(part, ranks, stage == 0, stage == last)
            for stage, part in enumerate(shape.stages(num_layers))
        )
        return cls(
            layer,
            (*num_layers[:-1], num_layers[-1] + shape.later_layers),
            tuple(of_parameter * count for count in parameters),
            (working,) * last + (max(working, logits),),
            working,
        )

    def recomputed_bytes(self, input_bytes: float) -> float:
        """Return what a token keeps in a layer that is computed again: ``input_bytes`` and, in a pipeline, its keys.

        Slices keep keys for later ones; whole micro-batches in flight took at least as much when they were measured.
        """
        return input_bytes + (self.layer.keys if len(self.num_layers) > 1 else 0.0)

    def recomputing(self, kept_bytes: float, num_tokens: int) -> StageMemory:
        """Return the memory of layers that keep ``kept_bytes`` of a token and are computed again one by one.

        ``num_tokens``: of the micro-batch whose layer is computed again.
        """
        again = replace(
            self,
            layer=replace(self.layer, activations=kept_bytes),
            again_bytes=self.layer.activations - kept_bytes,
            plain_working=self.working_bytes,
        )
        return again.running(num_tokens)

    def running(self, num_tokens: float) -> StageMemory:
        """Return the memory where each pass has at most ``num_tokens``, for which a layer is computed again."""
        if not self.plain_working:
            return self
        again = self.layer_working + num_tokens * self.again_bytes
        return replace(self, working_bytes=tuple(max(each, again) for each in self.plain_working))

    def without_states(self) -> StageMemory:
        """Return the memory besides parameters, gradients and optimizer states."""
        return replace(self, state_bytes=(0.0,) * len(self.num_layers))

    def most_bytes(self, layer_bytes: Sequence[float]) -> float:
        """Return the bytes of the stage that takes most; ``layer_bytes``: the most in a layer of each stage."""
        stages = zip(self.state_bytes, self.working_bytes, self.num_layers, layer_bytes, strict=True)
        return max(states + working + layers * each for states, working, layers, each in stages)
