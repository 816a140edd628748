"""Prefetches the weights of replicas; the transfers overlap with the computation of other layers.

When the first micro-batch of a step begins, the first layer of experts of a model chunk starts its transfer. Each layer
starts the next layer's transfer before it routes its tokens. A layer waits for its own transfer when it first computes
its replicas in the step. All ranks that share experts run the same layers and the same number of micro-batches, so they
start these transfers in the same order. No rank waits for a transfer before all of them have reached the previous
layer. The transfers use a separate communicator. Later micro-batches, slices and recomputed layers reuse the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron.bytescale.core.parallel_state import own_groups
from megatron.bytescale.core.transformer.moe.placed_layer import PlacedMoELayer, Placements
from megatron.bytescale.training.stock import ForwardStep, LossFunction

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


@dataclass
class FetchAhead:
    """The transfers of replica weights in a process.

    Attributes:
        placements: placements that its layers follow.
        chunks: identity of a model chunk -> its layers in slots, in execution order.
        is_training: whether the last pass was for training.
    """

    placements: Placements
    chunks: dict[int, list[PlacedMoELayer]] = field(default_factory=dict)
    is_training: bool = True

    def join(
        self, model_chunks: list[torch.nn.Module], device: torch.device, timeout_minutes: float
    ) -> list[torch.nn.Module]:
        """Hook in ``ModelConfig.pre_wrap_hooks``: create the communicator for weights. Collective, all processes."""
        ranks = tuple(dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()))
        self.placements.weights_group = own_groups("REPLICAS", [ranks], device, timeout_minutes)[ranks]
        return model_chunks

    def wrap(self, forward: ForwardStep) -> ForwardStep:
        """Return a forward step that starts its chunk's first transfer."""

        def forward_and_fetch(
            data_iterator: Iterator[object], model: torch.nn.Module, *args: object, **kwargs: object
        ) -> tuple[torch.Tensor, LossFunction]:
            layers = self.chunks.get(id(model))
            if layers is None:
                layers = self.chunks[id(model)] = linked_layers(model)
            if model.training != self.is_training:  # weights may change between training and evaluation
                self.forget()
                self.is_training = model.training
            if layers:
                layers[0].fetch()
            return forward(data_iterator, model, *args, **kwargs)

        return forward_and_fetch

    def forget(self) -> None:
        """Drop the weights of replicas and of grouped products, before the home weights change."""
        for layers in self.chunks.values():
            for layer in layers:
                layer.experts.forget()


def linked_layers(model: torch.nn.Module) -> list[PlacedMoELayer]:
    """Return a chunk's layers in slots; each is linked to prefetch the next layer's weights once they are gathered."""
    layers = [module for module in model.modules() if isinstance(module, PlacedMoELayer)]
    for layer, following in pairwise(layers):
        layer.fetch_next = following.fetch
    for layer in layers:
        layer.experts.before_reading = partial(wait_for_weights, model, layer.experts)
    return layers


def wait_for_weights(chunk: DistributedDataParallel, experts: torch.nn.Module) -> None:
    """Wait until the optimizer's ranks have gathered the weights of experts (``--overlap-param-gather``).

    Megatron's DDP waits in a hook of each module with weights. Here that is too late, because the weights are read
    earlier.
    """
    if not getattr(chunk, "remove_forward_pre_hook_handles", None):  # no gathers overlap with layers
        return
    wait = chunk._make_forward_pre_hook()
    for module in experts.modules():
        wait(module)
