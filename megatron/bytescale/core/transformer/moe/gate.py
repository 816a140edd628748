"""Routers whose tokens have many experts at first and few later, and layers that take any number of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bytescale_ext.plan.experts.gate import DenseToSparse
from megatron.bytescale.core.transformer.moe.counted_layer import CountedMoELayer
from megatron.bytescale.core.transformer.spec_utils import layers_of


@dataclass
class Gate:
    """The gate of all layers of a process in the running step.

    Attributes:
        plan: how it anneals.
        temperature: of the running step; None: the router is Megatron's.
        active: experts of all tokens of this rank since the last log line, a scalar.
        num_tokens: these tokens, once for each layer.
    """

    plan: DenseToSparse
    temperature: float | None = None
    active: torch.Tensor | int = 0
    num_tokens: int = 0

    def gates(self, logits: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return scores, 0 for dropped experts, and which are not dropped, both [tokens, experts] as ``logits``."""
        scores = torch.softmax(logits.float() / temperature, -1)
        chosen = scores > self.plan.threshold
        if self.plan.most_experts < logits.shape[-1]:
            best = scores.topk(self.plan.most_experts, -1).indices
            chosen &= torch.zeros_like(chosen).scatter(-1, best, True)
        return (scores * chosen).type_as(logits), chosen

    def note(self, chosen: torch.Tensor) -> None:
        """Count the experts of tokens. ``chosen``: [tokens, experts]."""
        self.active = self.active + chosen.sum()
        self.num_tokens += chosen.shape[0]

    def take_mean_active(self) -> float:
        """Return the mean number of experts of a token since the last call; 0 without tokens."""
        mean = float(self.active) / max(1, self.num_tokens)
        self.active, self.num_tokens = 0, 0
        return mean


def annealed(base: type[TopKRouter], gate: Gate) -> type[TopKRouter]:
    """Return a router that follows a gate, and is ``base`` once the gate has annealed."""

    class DenseToSparseRouter(base):  # type: ignore[valid-type,misc]
        """Megatron's losses, and the gate's experts."""

        def routing(
            self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            """Route tokens: logits [rows, b, experts] -> scores and choices, [tokens, experts] both."""
            routed: tuple[torch.Tensor, torch.Tensor] = super().routing(logits, padding_mask)
            if gate.temperature is None:
                return routed
            scores, chosen = gate.gates(logits.view(-1, logits.shape[-1]), gate.temperature)
            if self.training and torch.is_grad_enabled():
                gate.note(chosen)
            return scores + 0.0 * routed[0], chosen  # auxiliary losses hang on Megatron's scores

    return DenseToSparseRouter


class GatedMoELayer(CountedMoELayer):
    """Megatron's layer of experts, whose dispatcher takes any number of experts of a token while the gate anneals."""

    def __init__(self, *args: Any, gate: Gate, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate = gate
        config = copy.copy(self.config)
        config.moe_expert_capacity_factor = float(self.config.num_moe_experts)  # so that it counts what it sends
        groups = kwargs.get("pg_collection") or get_default_pg_collection()
        fixed: Any = self.token_dispatcher  # type: ignore[has-type]
        dispatcher: Callable[..., Any] = type(fixed)
        counting = dispatcher(self.num_local_experts, self.local_expert_indices, config=config, pg_collection=groups)
        if self.shared_expert_overlap and self.use_shared_expert:
            counting.set_shared_experts(self.shared_experts)
        self.dispatchers = {True: counting, False: fixed}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with the dispatcher of the running step."""
        self.token_dispatcher = self.dispatchers[self.gate.temperature is not None]
        return super().forward(*args, **kwargs)


def with_gate(spec: ModuleSpec | TransformerBlockSubmodules, gate: Gate) -> Any:
    """Change a new spec of a block or a layer: the routers of its layers of experts follow a gate."""
    for layer in layers_of(spec):
        mlp = layer.submodules.mlp
        if getattr(mlp, "func", None) in (MoELayer, CountedMoELayer):
            modules = mlp.keywords["submodules"]
            router: Any = modules.router if isinstance(modules.router, partial) else partial(modules.router)
            gated: Any = annealed(router.func, gate)
            modules = replace(modules, router=partial(gated, *router.args, **router.keywords))
            keywords = {**mlp.keywords, "submodules": modules, "gate": gate}
            layer.submodules.mlp = partial(GatedMoELayer, *mlp.args, **keywords)
    return spec
