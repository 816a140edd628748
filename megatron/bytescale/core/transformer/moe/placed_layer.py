"""Layers of experts that follow a placement: tokens go to slots, which hold home experts and replicas."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from bytescale_ext.plan.experts.placement import PlacementPlan
from megatron.bytescale.core.tensor_parallel.layers import ExpertRowParallelLinear
from megatron.bytescale.core.transformer.moe.counted_layer import CountedMoELayer, number_in_model
from megatron.bytescale.core.transformer.moe.slot_experts import Exchange, SlotExperts
from megatron.bytescale.core.transformer.moe.slots import SlotTable
from megatron.bytescale.core.transformer.spec_utils import layers_of

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher


@dataclass
class Placements:
    """The placement plans of this process's layers; they change between steps.

    Attributes:
        first: plan before any loads are known.
        by_layer: layer number in the model -> plan, for layers with a changed plan.
        weights_group: communicator for weights of replicas; None: use the communicator for tokens.
    """

    first: PlacementPlan
    by_layer: dict[int, PlacementPlan] = field(default_factory=dict)
    weights_group: torch.distributed.ProcessGroup | None = None

    def of(self, layer: int) -> PlacementPlan:
        """Return the plan of a layer."""
        return self.by_layer.get(layer, self.first)


class PlacedMoELayer(CountedMoELayer):
    """Megatron's layer of experts; its dispatcher sees each slot of the plan as an expert.

    Attributes:
        experts: experts and replicas on this rank.
        fetch_next: starts the transfer of replicas for the next layer.
    """

    experts: SlotExperts
    fetch_next: Callable[[], None] | None = None

    def __init__(
        self, *args: object, placements: Placements, pg_collection: ProcessGroupCollection | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, pg_collection=pg_collection, **kwargs)
        self.placements = placements
        self.experts.is_grouped = self.config.moe_grouped_gemm
        self.table: SlotTable | None = None
        groups = pg_collection or get_default_pg_collection()
        self.source_group = groups.tp_ep
        num_slots = placements.first.num_slots
        config = copy.copy(self.config)
        config.num_moe_experts = num_slots * self.ep_group.size()
        if config.moe_token_dispatcher_type == "flex":  # DeepEP then sends no choice of probability 0 to empty slots
            config.moe_expert_capacity_factor = float(config.num_moe_experts)
        first = num_slots * self.ep_group.rank()
        dispatcher: Callable[..., MoETokenDispatcher] = type(self.token_dispatcher)  # type: ignore[has-type]
        slots = list(range(first, first + num_slots))
        self.token_dispatcher = dispatcher(num_slots, slots, config=config, pg_collection=groups)
        if self.shared_expert_overlap and self.use_shared_expert:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    def route(
        self, hidden_states: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route hidden states [rows, b, hidden]; return probabilities and choices, both [tokens, slots]."""
        self.fetch()
        if self.fetch_next is not None:
            self.fetch_next()
        probs, chosen = super().route(hidden_states, padding_mask)
        assert self.table is not None
        return self.table.in_slots(probs, chosen, self.source_group)

    def fetch(self) -> None:
        """Apply the plan and start the transfer of replicas if it has not started. Collective on the expert group."""
        plan = self.placements.of(number_in_model(self))
        if self.table is None or self.table.plan is not plan:
            self.table = SlotTable.of(plan, next(self.parameters()).device)
            group = self.placements.weights_group
            self.experts.exchange = Exchange(plan, self.ep_group, group) if plan.num_replicas else None
            self.experts.forget()
        self.experts.fetch()


def with_slots(
    spec: ModuleSpec | TransformerBlockSubmodules, placements: Placements
) -> ModuleSpec | TransformerBlockSubmodules:
    """Make layers of experts that count tokens follow placements, in a new spec.

    In layers of TransformerEngine, experts in slots are Megatron's local modules.
    """
    for layer in layers_of(spec):
        mlp = layer.submodules.mlp
        if getattr(mlp, "func", None) is CountedMoELayer:
            modules = mlp.keywords["submodules"]
            linear = modules.experts.keywords["submodules"]
            if modules.experts.func is not SequentialMLP or linear.linear_fc1 is not ColumnParallelLinear:
                linear = MLPSubmodules(ColumnParallelLinear, ExpertRowParallelLinear, linear.activation_func)
            experts = partial(SlotExperts, submodules=linear)
            keywords = {**mlp.keywords, "submodules": replace(modules, experts=experts), "placements": placements}
            layer.submodules.mlp = partial(PlacedMoELayer, *mlp.args, **keywords)
    return spec
