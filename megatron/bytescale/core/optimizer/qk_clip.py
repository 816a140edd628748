"""QK-clip and the largest attention logit of a step, over documents (Kimi K2, section 2.1).

A head whose largest logit m of a step exceeds the threshold t has its weights scaled by ``eta = t / m`` after the
update, so that the logit would have been t. Queries take ``eta ** alpha`` of it and keys ``eta ** (1 - alpha)``. All
heads of a group of queries take the largest m of the group. In multi-latent attention keys share the part with
positions, so queries take all of it there::

    attention           rows of one weight                                       factors
    grouped queries     queries, (gate), keys, values of each group              eta^alpha, (1), eta^(1-alpha), 1
    latent, queries     without positions, with positions of each head           eta^alpha, eta
    latent, keys        without positions, values of each head                   eta^(1-alpha), 1

Megatron's own function fails on the shards of a distributed optimizer and on float32 models, and waits for the device
in each layer. Here nothing waits, except for states in host memory, which the processor scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.utils import unwrap_model
from megatron.training.utils import print_rank_0

from bytescale_ext.attention.largest import choose_largest
from bytescale_ext.states.node_memory import NodeRanks
from bytescale_ext.states.scaling import RowFactors

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from megatron.bytescale.runtime import Runtime

HOST = torch.device("cpu")
Part = tuple[torch.Tensor | float, int]
"""Factors [n] of n groups or heads, or one factor, and the number of rows of each that they scale."""


@dataclass(frozen=True)
class MainWeight:
    """The float32 copy of a weight that a part of the optimizer updates, or a shard of it.

    Attributes:
        part: part of the optimizer.
        copy: parameter of the optimizer, in the shape of the weight or flat.
        start: first element of the copy in the flattened weight.
    """

    part: MegatronOptimizer
    copy: torch.Tensor
    start: int

    def scale_(self, rows: RowFactors) -> None:
        """Scale the copy, in pages too, by the factors of the weight's rows."""
        if hasattr(self.part, "paged_adam"):
            self.part.paged_adam.scale_copy(self.copy, rows.on(HOST), self.start)
        else:
            rows.on(self.copy.device).scale_(self.copy.detach().view(-1), self.start)


MainWeights = Mapping[torch.nn.Parameter, MainWeight]
"""Float32 copies of this rank, by the model's parameter."""


def main_weights(parts: Iterable[MegatronOptimizer]) -> dict[torch.nn.Parameter, MainWeight]:
    """Return the float32 copies that the parts of an optimizer hold on this rank."""
    found = {}
    for part in parts:
        if part.is_stub_optimizer:
            continue
        if isinstance(part, DistributedOptimizer):
            groups = part.model_float16_groups, part.shard_fp32_from_float16_groups
            for weight, copy in _pairs(*groups):
                found[weight] = MainWeight(part, copy, part._get_model_param_range_map(weight)["param"].start)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            for weight, copy in _pairs(part.float16_groups, part.fp32_from_float16_groups):
                found[weight] = MainWeight(part, copy, 0)
    return found


def _pairs(weights: Sequence[Any], copies: Sequence[Any]) -> Iterator[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Return (weight, copy) of all groups."""
    return zip(chain(*weights), chain(*copies), strict=True)


def wrap_clip_qk(original: Callable[..., object], runtime: Runtime) -> Callable[..., object]:
    """Clip with the largest logits of our attention, after each optimizer step. Collective.

    Returns the largest logit of all layers and heads as a scalar on the device, at least 0 as in Megatron.
    """

    @torch.no_grad()
    def clip_qk(model: Sequence[torch.nn.Module], log_max_only: bool = False) -> torch.Tensor:
        attentions = attentions_of(model)
        largest = reduced([take_largest(attention, runtime.device) for attention in attentions])
        if not log_max_only:
            nodes = sharing_nodes(model)
            for attention, values in zip(attentions, largest, strict=True):
                for weight, rows in clipped_rows(attention, values):
                    scale_weight(weight, rows, runtime.parts.main_weights, nodes.get(weight))
            for node in dict.fromkeys(nodes.values()):
                node.barrier()
        return highest(largest, runtime.device)

    return clip_qk


def attentions_of(model: Sequence[torch.nn.Module]) -> list[Any]:
    """Return the self-attention of all layers of model chunks. As in Megatron, multi-token prediction is left out."""
    return [layer.self_attention for chunk in model for layer in unwrap_model(chunk).decoder.layers]


def measure_logits(runtime: Runtime, model: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.post_wrap_hooks``: let all attention measure its largest logits from now on."""
    kernel, run = runtime.parts.kernel, runtime.run
    assert kernel is not None, "the build of the model chooses the kernel"
    function, why_not = choose_largest(runtime.device, run.process.dtype, run.shape.head_dim)
    text = "the fused kernel" if why_not is None else f"torch ({why_not})"
    print_rank_0(f"> bytescale: largest attention logits: {text}")
    runtime.add_parts(kernel=replace(kernel, raise_largest=function))
    for attention in attentions_of(model):
        attention.core_attention.measures_logits = True
    return model


def take_largest(attention: Any, device: torch.device) -> torch.Tensor:
    """Return the largest logit of each head [heads] since the last call, and start again."""
    core = attention.core_attention
    largest, core.current_max_attn_logits = core.current_max_attn_logits, None
    if largest is not None:
        return largest  # type: ignore[no-any-return]
    heads = attention.config.num_attention_heads // attention.config.tensor_model_parallel_size
    return torch.full((heads,), -torch.inf, dtype=torch.float32, device=device)


def reduced(largest: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the maximum over data-parallel ranks of the largest logits [heads] of each layer, in one reduction."""
    if not largest:  # a stage without layers
        return []
    together = torch.cat(list(largest))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    return list(together.split([len(one) for one in largest]))


def highest(largest: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the maximum over all heads, tensor-parallel ranks and stages, at least 0, a scalar."""
    top = torch.cat([torch.zeros(1, device=device), *(one.float() for one in largest)]).amax()
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
    return top


def shrinkage(largest: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return ``eta`` of largest logits [n]: 1 up to the threshold, and for logits that are not finite."""
    return torch.where((largest > threshold) & largest.isfinite(), threshold / largest, 1.0).float()


def clipped_rows(attention: Any, largest: torch.Tensor) -> Iterator[tuple[torch.nn.Parameter, RowFactors]]:
    """Yield the weights of an attention layer and the factors of their rows; ``largest``: [heads].

    Collective on the tensor-parallel group if its ranks share groups of queries.
    """
    config = attention.config
    alpha, threshold = config.qk_clip_alpha, config.qk_clip_threshold
    if isinstance(attention, MLASelfAttention):
        eta = shrinkage(largest, threshold)
        query = attention.linear_q_proj if config.q_lora_rank is None else attention.linear_q_up_proj
        of_query = [(eta**alpha, config.qk_head_dim), (eta, config.qk_pos_emb_head_dim)]
        yield _rows_of(query.weight, row_factors(of_query))
        of_key = [(eta ** (1 - alpha), config.qk_head_dim), (1.0, config.v_head_dim)]
        yield _rows_of(attention.linear_kv_up_proj.weight, row_factors(of_key))
        return
    groups, ranks = config.num_query_groups, config.tensor_model_parallel_size
    if groups < ranks:  # the rows of a rank are a part of a group
        largest = gather_from_tensor_model_parallel_region(largest)
    of_rank = groups if groups < ranks else groups // ranks
    eta = shrinkage(largest.view(of_rank, -1).amax(1), threshold)
    size = config.kv_channels
    queries = size * (config.num_attention_heads // groups)
    gate = queries if config.attention_output_gate else 0
    factors = row_factors([(eta**alpha, queries), (1.0, gate), (eta ** (1 - alpha), size), (1.0, size)])
    if groups < ranks:
        factors = factors.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    yield _rows_of(attention.linear_qkv.weight, factors)


def row_factors(parts: Sequence[Part]) -> torch.Tensor:
    """Return the factor of each row [n * rows of one group or head]; the parts of a group are one after another."""
    count = next(len(factor) for factor, _ in parts if isinstance(factor, torch.Tensor))
    columns = []
    for factor, rows in parts:
        if isinstance(factor, torch.Tensor):
            columns.append(factor[:, None].expand(count, rows))
        else:
            columns.append(torch.full((count, rows), factor, device=columns[0].device))
    return torch.cat(columns, dim=1).flatten()


def _rows_of(weight: torch.nn.Parameter, factors: torch.Tensor) -> tuple[torch.nn.Parameter, RowFactors]:
    """Return a weight [rows, in] with the factors of its rows [rows]."""
    assert len(factors) == len(weight), f"{factors.shape=} {weight.shape=}"
    return weight, RowFactors(factors, weight.shape[1])


def scale_weight(
    weight: torch.nn.Parameter, rows: RowFactors, mains: MainWeights, node: NodeRanks | None = None
) -> None:
    """Scale the rows of a weight, and of its float32 copy on this rank.

    ``node``: ranks that share the weight in host memory, and scale a part each; None: the weight is not shared.
    """
    if weight in mains:
        mains[weight].scale_(rows)
    flat = weight.detach().view(-1)
    own = slice(0, len(flat)) if node is None else node.own(len(flat))
    rows.on(flat.device).scale_(flat[own], own.start)


def sharing_nodes(model: Sequence[Any]) -> dict[torch.nn.Parameter, NodeRanks]:
    """Return the ranks of this node that share a parameter in host memory (``--state-stage 3``), by parameter."""
    return {
        parameter: buffer.node
        for chunk in model
        for buffer in chunk.buffers + chunk.expert_parallel_buffers
        if getattr(buffer, "node", None) is not None and buffer.host_gradients.windows
        for parameter in buffer.params
    }
