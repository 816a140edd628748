"""Routers that use many experts per token at first and few later, and layers that accept any number of experts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bytescale_ext.plan.experts.gate import DenseToSparse
from megatron.bytescale.core.transformer.moe.counted_layer import CountedMoELayer, number_in_model
from megatron.bytescale.core.transformer.moe.latent_layer import LatentMoELayer
from megatron.bytescale.core.transformer.moe.placed_layer import PlacedMoELayer
from megatron.bytescale.core.transformer.spec_utils import layers_of
from megatron.bytescale.core.transformer.token_noise import gumbel_noise

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


@dataclass
class Gate:
    """The gate of all of a process's layers in the current step.

    Attributes:
        plan: schedule of the annealing.
        step: index of the current step.
        temperature: temperature of the current step; None: use Megatron's router.
        tokens: token numbers of the current pass, int64 [rows, b], independent of how ranks share tokens; used for
            noise.
        active: number of chosen experts, summed over this rank's tokens in the current step without padding, a scalar.
        num_tokens: number of these tokens, counted once per layer, a scalar.
    """

    plan: DenseToSparse
    step: int = 0
    temperature: float | None = None
    tokens: torch.Tensor | None = None
    active: torch.Tensor | int = 0
    num_tokens: torch.Tensor | int = 0

    def gates(
        self, logits: torch.Tensor, temperature: float, noise: torch.Tensor | float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores, which are 0 for dropped experts, and the choice of experts, both [tokens, experts].

        ``logits`` has the same shape, and so has ``noise``, which is added to the logits; or ``noise`` is 0.
        """
        scores = torch.softmax((logits.float() + noise) / temperature, -1)
        chosen = scores > self.plan.threshold
        if self.plan.most_experts < logits.shape[-1]:
            best = scores.topk(self.plan.most_experts, -1).indices
            chosen &= torch.zeros_like(chosen).scatter(-1, best, True)
        return (scores * chosen).type_as(logits), chosen

    def noise(self, layer: int, shape: torch.Size) -> torch.Tensor | float:
        """Return Gumbel noise [tokens, experts] for a layer's logits of ``shape`` [rows, b, experts]; 0 without noise.

        Under sequence parallelism the rows are this tensor-parallel rank's part of the pass.
        """
        if self.plan.noise_seed is None:
            return 0.0
        assert self.tokens is not None
        mine, num_rows = self.tokens, shape[0]
        if len(mine) != num_rows:
            mine = mine[num_rows * parallel_state.get_tensor_model_parallel_rank() :][:num_rows]
        return gumbel_noise(mine.reshape(-1), shape[-1], (self.plan.noise_seed, self.step, layer))

    def note(self, chosen: torch.Tensor, padding: torch.Tensor | None = None) -> None:
        """Count the chosen experts. ``chosen``: [tokens, experts]; ``padding``: [tokens], True for padding."""
        if padding is not None:
            chosen = chosen & ~padding[:, None]
        self.active = self.active + chosen.sum()
        self.num_tokens = self.num_tokens + (len(chosen) if padding is None else (~padding).sum())

    def take_active(self) -> tuple[torch.Tensor | int, torch.Tensor | int]:
        """Return the chosen experts of all tokens and the number of tokens since the last call, both scalars."""
        taken = self.active, self.num_tokens
        self.active = self.num_tokens = 0
        return taken


def annealed(base: type[TopKRouter], gate: Gate) -> type[TopKRouter]:
    """Return a router class that follows a gate, and acts as ``base`` once the gate has annealed."""

    class DenseToSparseRouter(base):  # type: ignore[valid-type,misc]
        """Applies Megatron's losses, with experts chosen by the gate. Noise is only for training."""

        def routing(
            self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Route tokens: logits [rows, b, experts] -> scores and choices, both [tokens, experts]."""
            routed: tuple[torch.Tensor, torch.Tensor] = super().routing(logits, padding_mask)
            if gate.temperature is None:
                return routed
            noise = gate.noise(number_in_model(self), logits.shape) if self.training else 0.0
            scores, chosen = gate.gates(logits.view(-1, logits.shape[-1]), gate.temperature, noise)
            if self.training and torch.is_grad_enabled():
                gate.note(chosen, None if padding_mask is None else padding_mask.reshape(-1))
            return scores + 0.0 * routed[0], chosen  # Megatron's scores carry the auxiliary losses

    return DenseToSparseRouter


@functools.cache
def gated(base: type[CountedMoELayer]) -> type[CountedMoELayer]:
    """Return a layer class whose dispatcher accepts any number of experts per token until the gate has annealed."""

    class GatedMoELayer(base):  # type: ignore[valid-type,misc]
        """A layer of experts, possibly in slots, with two dispatchers."""

        def __init__(
            self, *args: object, gate: Gate, pg_collection: ProcessGroupCollection | None = None, **kwargs: object
        ) -> None:
            super().__init__(*args, pg_collection=pg_collection, **kwargs)
            self.gate = gate
            fixed: MoETokenDispatcher = self.token_dispatcher  # type: ignore[has-type]
            config = copy.copy(fixed.config)
            config.moe_expert_capacity_factor = float(config.num_moe_experts)  # makes the dispatcher count tokens
            config.moe_router_topk = gate.plan.most_experts  # columns of choices for DeepEP; unused ones are -1
            groups = pg_collection or get_default_pg_collection()
            dispatcher: Callable[..., MoETokenDispatcher] = type(fixed)
            local = fixed.num_local_experts, fixed.local_expert_indices
            counting = dispatcher(*local, config=config, pg_collection=groups)
            if self.shared_expert_overlap and self.use_shared_expert:
                counting.set_shared_experts(self.shared_experts)
            self.dispatchers = {True: counting, False: fixed}

        def forward(self, *args: object, **kwargs: object) -> object:
            """Run the layer with the dispatcher for the current step."""
            self.token_dispatcher = self.dispatchers[self.gate.temperature is not None]
            return super().forward(*args, **kwargs)

    return GatedMoELayer


def with_gate(spec: ModuleSpec | TransformerBlockSubmodules, gate: Gate) -> ModuleSpec | TransformerBlockSubmodules:
    """Make the routers of layers of experts follow a gate, in a new spec of a block or a layer."""
    for layer in layers_of(spec):
        mlp = layer.submodules.mlp
        kind = getattr(mlp, "func", None)
        if kind in (MoELayer, LatentMoELayer, CountedMoELayer, PlacedMoELayer):
            modules = mlp.keywords["submodules"]
            router: Callable[..., TopKRouter] = modules.router
            given = router if isinstance(router, partial) else partial(router)
            following: Callable[..., object] = annealed(cast("type[TopKRouter]", given.func), gate)
            modules = replace(modules, router=partial(following, *given.args, **given.keywords))
            keywords = {**mlp.keywords, "submodules": modules, "gate": gate}
            base = kind if kind in (CountedMoELayer, PlacedMoELayer) else CountedMoELayer
            layer.submodules.mlp = partial(gated(base), *mlp.args, **keywords)
    return spec
