"""Routers whose tokens have many experts at first and few later, and layers that take any number of them."""

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
from megatron.bytescale.core.transformer.moe.counted_layer import CountedMoELayer
from megatron.bytescale.core.transformer.moe.gate_noise import gumbel_noise
from megatron.bytescale.core.transformer.moe.placed_layer import PlacedMoELayer
from megatron.bytescale.core.transformer.spec_utils import layers_of

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


@dataclass
class Gate:
    """The gate of all layers of a process in the running step.

    Attributes:
        plan: how it anneals.
        step: that runs.
        temperature: of it; None: the router is Megatron's.
        tokens: int64 [rows, b], a number for each token of the running pass, the same however tokens are laid out over
            ranks; only with noise.
        active: experts of all tokens of this rank in the running step, padding left out, a scalar.
        num_tokens: these tokens, once for each layer, a scalar.
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
        """Return scores, 0 for dropped experts, and which are not dropped, both [tokens, experts] as ``logits``.

        ``noise``: [tokens, experts], added to the logits; or 0.
        """
        scores = torch.softmax((logits.float() + noise) / temperature, -1)
        chosen = scores > self.plan.threshold
        if self.plan.most_experts < logits.shape[-1]:
            best = scores.topk(self.plan.most_experts, -1).indices
            chosen &= torch.zeros_like(chosen).scatter(-1, best, True)
        return (scores * chosen).type_as(logits), chosen

    def noise(self, layer: int, shape: torch.Size) -> torch.Tensor | float:
        """Return Gumbel noise [tokens, experts] for logits of a layer of ``shape`` [rows, b, experts]; 0 without noise.

        Under sequence parallelism the rows are the tensor-parallel rank's part of those of the pass.
        """
        if self.plan.noise_seed is None:
            return 0.0
        assert self.tokens is not None
        mine, num_rows = self.tokens, shape[0]
        if len(mine) != num_rows:
            mine = mine[num_rows * parallel_state.get_tensor_model_parallel_rank() :][:num_rows]
        return gumbel_noise(mine.reshape(-1), shape[-1], (self.plan.noise_seed, self.step, layer))

    def note(self, chosen: torch.Tensor, padding: torch.Tensor | None = None) -> None:
        """Count the experts of tokens. ``chosen``: [tokens, experts]; ``padding``: [tokens], True in padding."""
        if padding is not None:
            chosen = chosen & ~padding[:, None]
        self.active = self.active + chosen.sum()
        self.num_tokens = self.num_tokens + (len(chosen) if padding is None else (~padding).sum())

    def take_active(self) -> tuple[torch.Tensor | int, torch.Tensor | int]:
        """Return experts of all tokens and the number of tokens since the last call, both scalars."""
        taken = self.active, self.num_tokens
        self.active = self.num_tokens = 0
        return taken


def annealed(base: type[TopKRouter], gate: Gate) -> type[TopKRouter]:
    """Return a router that follows a gate, and is ``base`` once the gate has annealed."""

    class DenseToSparseRouter(base):  # type: ignore[valid-type,misc]
        """Megatron's losses, and the gate's experts. Noise is for training alone."""

        def routing(
            self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Route tokens: logits [rows, b, experts] -> scores and choices, [tokens, experts] both."""
            routed: tuple[torch.Tensor, torch.Tensor] = super().routing(logits, padding_mask)
            if gate.temperature is None:
                return routed
            noise = gate.noise(self.layer_number, logits.shape) if self.training else 0.0
            scores, chosen = gate.gates(logits.view(-1, logits.shape[-1]), gate.temperature, noise)
            if self.training and torch.is_grad_enabled():
                gate.note(chosen, None if padding_mask is None else padding_mask.reshape(-1))
            return scores + 0.0 * routed[0], chosen  # auxiliary losses hang on Megatron's scores

    return DenseToSparseRouter


@functools.cache
def gated(base: type[CountedMoELayer]) -> type[CountedMoELayer]:
    """Return a layer whose dispatcher takes any number of experts of a token while the gate anneals."""

    class GatedMoELayer(base):  # type: ignore[valid-type,misc]
        """A layer of experts, or of experts in slots, with two dispatchers."""

        def __init__(
            self, *args: object, gate: Gate, pg_collection: ProcessGroupCollection | None = None, **kwargs: object
        ) -> None:
            super().__init__(*args, pg_collection=pg_collection, **kwargs)
            self.gate = gate
            fixed: MoETokenDispatcher = self.token_dispatcher  # type: ignore[has-type]
            config = copy.copy(fixed.config)
            config.moe_expert_capacity_factor = float(config.num_moe_experts)  # so that it counts what it sends
            groups = pg_collection or get_default_pg_collection()
            dispatcher: Callable[..., MoETokenDispatcher] = type(fixed)
            local = fixed.num_local_experts, fixed.local_expert_indices
            counting = dispatcher(*local, config=config, pg_collection=groups)
            if self.shared_expert_overlap and self.use_shared_expert:
                counting.set_shared_experts(self.shared_experts)
            self.dispatchers = {True: counting, False: fixed}

        def forward(self, *args: object, **kwargs: object) -> object:
            """Run the layer with the dispatcher of the running step."""
            self.token_dispatcher = self.dispatchers[self.gate.temperature is not None]
            return super().forward(*args, **kwargs)

    return GatedMoELayer


def with_gate(spec: ModuleSpec | TransformerBlockSubmodules, gate: Gate) -> ModuleSpec | TransformerBlockSubmodules:
    """Change a new spec of a block or a layer: the routers of its layers of experts follow a gate."""
    for layer in layers_of(spec):
        mlp = layer.submodules.mlp
        kind = getattr(mlp, "func", None)
        if kind in (MoELayer, CountedMoELayer, PlacedMoELayer):
            modules = mlp.keywords["submodules"]
            router: Callable[..., TopKRouter] = modules.router
            given = router if isinstance(router, partial) else partial(router)
            following: Callable[..., object] = annealed(cast("type[TopKRouter]", given.func), gate)
            modules = replace(modules, router=partial(following, *given.args, **given.keywords))
            keywords = {**mlp.keywords, "submodules": modules, "gate": gate}
            base = CountedMoELayer if kind is MoELayer else kind
            layer.submodules.mlp = partial(gated(base), *mlp.args, **keywords)
    return spec
