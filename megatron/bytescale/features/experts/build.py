"""Fetch the weights of replicas ahead: they travel while other layers compute.

When the first micro-batch of a step begins, the first layer of experts of a model chunk starts its transfer; each layer
starts that of the layer after it, before it routes its tokens. A layer waits for its own where it computes its replicas
for the first time in the step. All ranks that share experts run the same layers and equally many micro-batches, so they
start these transfers in the same order; and no rank waits for one before all of them have reached the layer before it.
The transfers have a communicator of their own. Later micro-batches, slices and recomputed layers find the weights.
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
    """The transfers of a process.

    Attributes:
        placements: that its layers follow.
        chunks: its layers in slots, by the identity of their model chunk, in the order in which they run.
        is_training: of the last pass.
    """

    placements: Placements
    chunks: dict[int, list[PlacedMoELayer]] = field(default_factory=dict)
    is_training: bool = True

    def join(self, model_chunks: list[torch.nn.Module], timeout_minutes: float) -> list[torch.nn.Module]:
        """``ModelConfig.pre_wrap_hooks``: join the communicator for weights. Collective over all processes."""
        ranks = tuple(dist.get_process_group_ranks(parallel_state.get_expert_model_parallel_group()))
        self.placements.weights_group = own_groups([ranks], timeout_minutes)[ranks]
        return model_chunks

    def wrap(self, forward: ForwardStep) -> ForwardStep:
        """Return a forward step that starts the first transfer of its chunk."""

        def forward_and_fetch(
            data_iterator: Iterator[object], model: torch.nn.Module, *args: object, **kwargs: object
        ) -> tuple[torch.Tensor, LossFunction]:
            layers = self.chunks.get(id(model))
            if layers is None:
                layers = self.chunks[id(model)] = linked_layers(model)
            if model.training != self.is_training:  # before and after an evaluation the weights may change
                self.forget()
                self.is_training = model.training
            if layers:
                layers[0].fetch()
            return forward(data_iterator, model, *args, **kwargs)

        return forward_and_fetch

    def forget(self) -> None:
        """Give the weights of replicas up, before those of homes change."""
        for layers in self.chunks.values():
            for layer in layers:
                layer.experts.fetched = None


def linked_layers(model: torch.nn.Module) -> list[PlacedMoELayer]:
    """Return the layers in slots of a model chunk; each fetches for the one after it, from weights that are whole."""
    layers = [module for module in model.modules() if isinstance(module, PlacedMoELayer)]
    for layer, following in pairwise(layers):
        layer.fetch_next = following.fetch
    for layer in layers:
        layer.experts.before_reading = partial(wait_for_weights, model, layer.experts)
    return layers


def wait_for_weights(chunk: DistributedDataParallel, experts: torch.nn.Module) -> None:
    """Wait until the optimizer's ranks have gathered the weights of experts (``--overlap-param-gather``).

    Megatron's DDP waits in a hook of each module that has weights, which here would be too late: they are read before.
    """
    if not getattr(chunk, "remove_forward_pre_hook_handles", None):  # nothing is gathered while layers run
        return
    wait = chunk._make_forward_pre_hook()
    for module in experts.modules():
        wait(module)
