"""Draft heads: they predict the tokens after the next token from the hidden states of a trained model.

``clover`` follows Clover (arXiv 2405.00263) with the refinements of Clover-2 (2408.00264). First the state of a token
is merged with the token that follows it (``TokenMerge``) and passes through ``num_layers`` transformer layers. Then
each head merges the state with the token that the previous head predicted. ``medusa`` (arXiv 2401.10774) has
independent residual blocks.

Both reuse the model's output layer to predict, and Clover also uses its weight as token embedding. Transformer layers
are split over the tensor-parallel ranks like the model's layers. All other parameters are replicated: under sequence
parallelism each rank has its own tokens, so the parameters are marked and Megatron sums their gradients.
"""

from __future__ import annotations

import zlib

import torch
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from bytescale_ext.config.drafts import DraftConfig
from megatron.bytescale.core.transformer.norm import LocalNorm
from megatron.bytescale.core.transformer.transformer_layer import PlannedTransformerLayer

NOISE = 0.01


class TokenMerge(torch.nn.Module):
    """Clover's attention decoder: each attention head of the state attends to one token, weighted by their cosine."""

    def __init__(self, config: TransformerConfig, name: str) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads if config.hidden_size % config.num_attention_heads == 0 else 1
        self.norm = LocalNorm(config, config.hidden_size, config.layernorm_epsilon)
        self.query, self.key, self.value = (
            replicated(config, 1, f"{name}.{kind}") for kind in ("query", "key", "value")
        )
        with torch.no_grad():
            self.value.weight.sub_(torch.eye(config.hidden_size).to(self.value.weight))

    def forward(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Merge the embedded token [s, b, h] of each row into the state [s, b, h]."""
        query, key, value = (
            vectors.unflatten(-1, (self.num_heads, -1))
            for vectors in (self.query(self.norm(state)), self.key(embedded), self.value(embedded))
        )
        weight = torch.nn.functional.cosine_similarity(query, key, dim=-1)
        return state + (weight.unsqueeze(-1) * value).flatten(-2)


class DraftHeads(MegatronModule):
    """The draft heads of a model and the layers below them, as a child of Megatron's model and in its checkpoints."""

    def __init__(self, config: TransformerConfig, settings: DraftConfig, layer: ModuleSpec) -> None:
        super().__init__(config=config)
        self.settings = settings
        for index in range(settings.num_layers):  # named children: each shards its own tensors in checkpoints
            built = build_module(layer, config=config, layer_number=config.num_layers, add_layer_offset=False)
            if isinstance(built, PlannedTransformerLayer):
                built.run_as(config.num_layers + 1 + index)
            if config.num_moe_experts:
                begin_without_mlp(built, f"layer{index}", config.gated_linear_unit)
            self.add_module(f"layer{index}", built)
        self.norm = LocalNorm(config, config.hidden_size, config.layernorm_epsilon)
        if settings.kind == "clover":
            self.start = TokenMerge(config, "start")
            self.first = replicated(config, 1, "first")
            if settings.num_heads > 1:
                self.step = TokenMerge(config, "step")
                self.later = replicated(config, 2, "later")
            self.head_norm = LocalNorm(config, config.hidden_size, config.layernorm_epsilon)
        else:
            self.blocks = torch.nn.ModuleList(replicated(config, 0, f"block{i}") for i in range(settings.num_heads))
        for parameter in self.parameters():
            if not getattr(parameter, "tensor_model_parallel", False):
                parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def states(self, hidden: torch.Tensor, embedded: torch.Tensor, **layer_inputs: object) -> torch.Tensor:
        """Return the state [s, b, h] of the first head.

        Args:
            hidden: hidden states [s, b, h] before the model's last norm.
            embedded: embedding of the token after each row, [s, b, h].
            layer_inputs: angles and layout of the rows, as Megatron's layers expect them.
        """
        state = self.start(hidden, embedded) if self.settings.kind == "clover" else hidden
        for index in range(self.settings.num_layers):
            state, _ = getattr(self, f"layer{index}")(state, attention_mask=None, **layer_inputs)
        normed: torch.Tensor = self.norm(state)
        return normed

    def head(self, index: int, state: torch.Tensor, embedded: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (the state of head ``index``, its input to the output layer), both [s, b, h].

        Args:
            index: index of the head.
            state: state [s, b, h] of the previous head; for the first head, the result of ``states``.
            embedded: embedding [s, b, h] of the token that the previous head predicts; None for the first head.
        """
        if self.settings.kind == "medusa":
            return state, state + torch.nn.functional.silu(self.blocks[index](state))
        if embedded is None:
            return state, self.head_norm(self.first(state))
        state = self.step(state, embedded)
        return state, self.head_norm(self.later(torch.cat((state, embedded), dim=-1)))


def begin_without_mlp(layer: torch.nn.Module, name: str, is_gated: bool) -> None:
    """Initialize the MLP of a layer: its output is zero, and its first product has small noise.

    Weights of a model's experts fit no dense MLP. The noise depends only on the name, so that all parallel layouts
    start with equal weights.
    """
    first, last = (layer.get_submodule(f"mlp.linear_fc{number}") for number in (1, 2))
    group = get_tensor_model_parallel_group()
    rank, ranks = group.rank(), group.size()
    assert isinstance(first.weight, torch.nn.Parameter), f"{first=}"
    assert isinstance(last.weight, torch.nn.Parameter), f"{last=}"
    rows, width = first.weight.shape
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    whole = torch.empty(ranks * rows, width).uniform_(-NOISE, NOISE, generator=generator)
    with torch.no_grad():
        first.weight.copy_(part_of_rank(whole, 0, is_gated, rank, ranks))
        last.weight.zero_()


def part_of_rank(whole: torch.Tensor, dim: int, is_gated: bool, rank: int, ranks: int) -> torch.Tensor:
    """Return a tensor-parallel rank's part of a tensor of any shape, cut along ``dim``.

    A rank has a part of each half of the first product of a gated MLP (``is_gated``).
    """
    halves = whole.chunk(2, dim) if is_gated else (whole,)
    return torch.cat([half.chunk(ranks, dim)[rank] for half in halves], dim)


def replicated(config: TransformerConfig, inputs: int, name: str) -> torch.nn.Linear:
    """Return a linear layer [h, inputs * h], initialized as the identity of its first input plus small noise.

    With ``inputs`` 0 the layer has one input and all weights are zero. The noise depends only on the name, so that all
    parallel layouts start with equal weights.
    """
    size = config.hidden_size
    layer = torch.nn.Linear(
        max(inputs, 1) * size, size, bias=False, dtype=config.params_dtype, device=torch.cuda.current_device()
    )
    weight = torch.zeros(size, max(inputs, 1) * size)
    if inputs:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        weight.uniform_(-NOISE, NOISE, generator=generator)[:, :size] += torch.eye(size)
    with torch.no_grad():
        layer.weight.copy_(weight)
    return layer


def embed_by_output(
    tokens: torch.Tensor, weight: torch.Tensor, group: torch.distributed.ProcessGroup, scatter: bool
) -> torch.Tensor:
    """Return the rows [s, b, h] of the output weight for tokens [b, s].

    Collective on the tensor-parallel group.

    Args:
        tokens: token ids.
        weight: this rank's rows [v / tp, h] of the output layer's weight.
        group: tensor-parallel ranks.
        scatter: whether to return only this rank's part [s / tp, b, h] of the sequence.
    """
    rows = weight.shape[0]
    local = tokens.transpose(0, 1) - group.rank() * rows
    is_mine = (local >= 0) & (local < rows)
    embedded = torch.nn.functional.embedding(local.clamp(0, rows - 1), weight.detach()) * is_mine.unsqueeze(-1)
    reduce = reduce_scatter_to_sequence_parallel_region if scatter else reduce_from_tensor_model_parallel_region
    reduced: torch.Tensor = reduce(embedded, group=group)
    return reduced
