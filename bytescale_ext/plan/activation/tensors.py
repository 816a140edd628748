"""Tensors that a layer saves for its backward pass, with their sizes and the cost of recomputing them.

These are MEMO's skeletal activations (Zhao et al. 2025, section 3.2, Fig. 4). The layer input and the output of
attention are never recomputed: from them all other tensors can be rebuilt token by token, without attention
(section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from bytescale_ext.plan.activation.operators import FUSED, LayerOperators
from bytescale_ext.plan.cost.model_shape import ModelShape, has_latents, key_value_numbers

LSE_BYTES: Final = 4
"""The log-sum-exp of attention is one float32 per token and head."""

EXPERT_LOAD: Final = 1.5
"""The most tokens at the experts of a rank that budgets assume, over their number in an even spread.

A router that spreads tokens less evenly exceeds the budget.
"""

INNER_GRADIENTS: Final = 2
"""Tensors of the inner width that the backward pass of an expert's gated activation function adds at its peak.

If it is split, it holds six gradients, of both factors and of both padded to the width of the first product. By then it
has freed four of the saved tensors: the activation, the gate, their product, and the product with the probability.
If it is fused, it holds the gradients of its input and its output, and has freed its output.
"""


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """One tensor that a layer's backward pass needs.

    Attributes:
        name: printed name, for example "attention output".
        kind: one of five kinds. "input" is never recomputed. "matrix" is the output of matrix products. "cheap" is
            recomputed from another tensor by one pass over memory. "key" is the part of a matrix product that slices
            store separately. "view" is a part that exists only because another part is a view of the same memory.
            Policies keep the saved parts of such products, or the whole product if they recompute from it.
        bytes_per_token: bytes for each token on one rank, as all other figures the mean of all layers.
        flops_per_token: FLOPs of the matrix products that rebuild it, on one rank.
        moved_bytes_per_token: device memory read and written to rebuild it.
        received_bytes_per_token: bytes that a rank receives in the collectives of tensor parallelism that rebuilding
            repeats.
        share: share of the layers that have the tensor.
    """

    name: str
    kind: str
    bytes_per_token: float
    flops_per_token: float = 0.0
    moved_bytes_per_token: float = 0.0
    received_bytes_per_token: float = 0.0
    share: float = 1.0

    def in_share(self, share: float) -> LayerTensor:
        """Return the mean of this tensor over all layers, if only a ``share`` of the layers has it."""
        return replace(
            self,
            bytes_per_token=share * self.bytes_per_token,
            flops_per_token=share * self.flops_per_token,
            moved_bytes_per_token=share * self.moved_bytes_per_token,
            received_bytes_per_token=share * self.received_bytes_per_token,
            share=share,
        )


QUERY, KEYS = "query", "key, value"


def widest_bytes(tensors: Sequence[LayerTensor]) -> float:
    """Return the bytes of a token in the largest of the tensors, in a layer that has it.

    Queries, keys and values count as one tensor, because their gradients exist together.
    """
    of_heads = sum(
        tensor.bytes_per_token for tensor in tensors if tensor.name in (QUERY, KEYS) and tensor.kind != "key"
    )
    return max(of_heads, *(tensor.bytes_per_token / tensor.share for tensor in tensors))


def received_bytes(shape: ModelShape, tensor_parallel: int, element_bytes: int = 2) -> float:
    """Return the bytes that a rank receives to gather, or to reduce and scatter, one token's hidden state.

    A layer's forward pass has four such collectives: with sequence parallelism two of each kind, without it two
    all-reduces, which receive twice as much (Korthikanti et al. 2022, section 4.2.2).
    """
    return float(shape.hidden * element_bytes * (tensor_parallel - 1) / tensor_parallel)


VIRTUAL_MESSAGES: Final = 4
"""Messages that exist during a pass of a virtual stage: two in each direction."""


def gathered_bytes(shape: ModelShape, tensor_parallel: int, element_bytes: int, sequence_parallel: bool) -> float:
    """Return the bytes per token of the buffer for hidden states that tensor-parallel ranks gather.

    The buffer has the size of the largest pass and is never freed (Megatron's global memory buffer). It is empty
    without sequence parallelism.
    """
    return float(shape.hidden * element_bytes * (sequence_parallel and tensor_parallel > 1))


def message_bytes(shape: ModelShape, tensor_parallel: int, element_bytes: int, sequence_parallel: bool) -> float:
    """Return the bytes of a token in a message between pipeline stages; sequence parallelism shares its tokens."""
    return float(shape.hidden * element_bytes / (tensor_parallel if sequence_parallel else 1))


def layer_tensors(
    shape: ModelShape,
    element_bytes: int = 2,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    operators: LayerOperators = FUSED,
    sliced: bool = False,
) -> tuple[LayerTensor, ...]:
    """Return the tensors of one layer on one rank, in the order of the forward pass.

    Fused kernels save only their input; other kernels also save the tensors of ``split_tensors``. If a norm and the
    matrix product after it are one module, the norm's output cannot be recomputed without that product, so its kind is
    "input". The norms before latent attention and before experts are always separate modules. A layer with experts has
    no tensors of an MLP, because experts keep their own tensors on the device (``expert_bytes``). With slices
    (``sliced``) keys and values are a separate tensor, because attention stores a copy for later slices
    (``HeldSlices``).
    """
    into_qkv = "input" if operators.joined_norms and shape.latent is None else "cheap"
    into_mlp = "input" if operators.joined_norms and not shape.num_expert_layers else "cheap"
    whole, values = float(shape.hidden * element_bytes), shape.num_heads * shape.value_dim / tensor_parallel
    whole /= tensor_parallel if sequence_parallel else 1
    inner, gates = shape.ffn_hidden / tensor_parallel, 2 if shape.gated else 1
    first = gates * inner
    width = 2.0 * shape.hidden
    received = received_bytes(shape, tensor_parallel, element_bytes)
    gathered = received if sequence_parallel else 0.0
    reduced = received if sequence_parallel else 2 * received
    attention = (
        LayerTensor("layer input", "input", whole),
        LayerTensor("input norm output", into_qkv, whole, 0.0, 2 * whole),
        *head_tensors(shape, element_bytes, tensor_parallel, gathered, sliced),
        LayerTensor("attention output", "input", values * element_bytes),
        LayerTensor("attention log-sum-exp", "input", LSE_BYTES * shape.num_heads / tensor_parallel),
        LayerTensor("residual after attention", "matrix", whole, width * values, 0.0, reduced),
        LayerTensor("MLP norm output", into_mlp, whole, 0.0, 2 * whole),
    )
    unfused = split_tensors(shape, operators, element_bytes, tensor_parallel, sequence_parallel)
    if operators.joined_norms:
        latents = joined_latents(shape, element_bytes, tensor_parallel if sequence_parallel else 1)
    else:
        latents = latent_tensors(shape, element_bytes, tensor_parallel, gathered)
    attention = (*attention, *latents, *unfused)
    if not shape.dense_share:
        return attention
    of_first = [LayerTensor("MLP first output", "matrix", first * element_bytes, width * first, 0.0, gathered)]
    if shape.gated and operators.split_activation:
        of_first = [
            LayerTensor("MLP gate", "matrix", inner * element_bytes, width * first, 0.0, gathered),
            LayerTensor("MLP first output beside it", "view", inner * element_bytes),
        ]
    of_last = LayerTensor("activation output", "cheap", inner * element_bytes, 0.0, (gates + 1) * inner * element_bytes)
    return (*attention, *(tensor.in_share(shape.dense_share) for tensor in (*of_first, of_last)))


def head_tensors(
    shape: ModelShape, element_bytes: int, tensor_parallel: int, gathered: float, sliced: bool
) -> tuple[LayerTensor, ...]:
    """Return the queries, keys and values of one layer; ``gathered``: bytes received for their inputs.

    In latent attention, keys and values are no output of a matrix product that policies keep. Policies that rebuild
    "cheap" tensors expand them again, and layers in slices find them in the copy for later slices.
    """
    query, keys = shape.num_heads * shape.head_dim / tensor_parallel, key_value_numbers(shape, tensor_parallel)
    if shape.latent is None:
        rebuild = (2.0 * shape.hidden * (query + keys), 0.0, gathered)
        if not sliced:
            return (LayerTensor("query, key, value", "matrix", (query + keys) * element_bytes, *rebuild),)
        of_query = LayerTensor(QUERY, "matrix", query * element_bytes, *rebuild)
        return of_query, LayerTensor(KEYS, "key", keys * element_bytes)
    flops = 2.0 * (shape.latent.query_rank or shape.hidden) * query
    expanded = 0.0 if has_latents(shape, tensor_parallel) else 2.0 * shape.latent.key_rank * keys
    if sliced:
        return (LayerTensor(QUERY, "matrix", query * element_bytes, flops + expanded, 0.0, gathered),)
    of_query = LayerTensor(QUERY, "matrix", query * element_bytes, flops, 0.0, gathered)
    return of_query, LayerTensor(KEYS, "cheap", keys * element_bytes, expanded, 2 * keys * element_bytes)


def latent_tensors(
    shape: ModelShape, element_bytes: int, tensor_parallel: int, gathered: float
) -> tuple[LayerTensor, ...]:
    """Return the latent vectors of Megatron's local layers and their norms' outputs.

    ``gathered``: bytes received for them.
    """
    latent = shape.latent
    if latent is None:
        return ()
    numbers = latent.query_rank + latent.latent_numbers
    flops = 2.0 * shape.hidden * numbers
    vectors = LayerTensor("latent vectors", "matrix", float(numbers * element_bytes), flops, 0.0, gathered)
    normed_keys = 0 if has_latents(shape, tensor_parallel) else latent.key_rank
    norms = latent.has_norms * float(latent.query_rank + normed_keys) * element_bytes
    if not norms:
        return (vectors,)
    return vectors, LayerTensor("normed latent vectors", "cheap", norms, 0.0, 2 * norms)


def joined_latents(shape: ModelShape, element_bytes: int, ranks: int) -> tuple[LayerTensor, ...]:
    """Return the latent vectors of TransformerEngine's layers and their norms' outputs; ``ranks`` share the tokens.

    The weights of the latents are whole on each rank. A norm and the product after it are one module: the product of
    queries, whose input is the hidden state if queries have no latent, and the product of keys and values. The latter
    saves a copy of its part of the latent, and is recomputed as a whole.
    """
    latent = shape.latent
    if latent is None:
        return ()
    each = element_bytes / ranks
    flops = 2.0 * shape.hidden * (latent.query_rank + latent.latent_numbers) / ranks
    vectors = LayerTensor("latent vectors", "matrix", (latent.query_rank + latent.key_rank) * each, flops)
    if not latent.has_norms:
        return (vectors,)
    normed_query, normed_keys = (latent.query_rank or shape.hidden) * each, latent.key_rank * each
    return (
        vectors,
        LayerTensor("normed query latent", "input", normed_query),
        LayerTensor("normed key latent", "cheap", normed_keys, 0.0, 2 * normed_keys),
    )


def split_tensors(
    shape: ModelShape,
    operators: LayerOperators,
    element_bytes: int = 2,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> tuple[LayerTensor, ...]:
    """Return the intermediate tensors that the unfused operators of a layer save.

    All these operators are between matrix products and attention, so their tensors are recomputed like other "cheap"
    tensors.
    """
    norms_of = shape.hidden / (tensor_parallel if sequence_parallel else 1)
    query, keys = shape.num_heads * shape.head_dim / tensor_parallel, key_value_numbers(shape, tensor_parallel)
    of_heads = 0.0
    if operators.qk_norms:  # keys before their norm view the whole product; queries may too
        copied = query if shape.num_kv_heads < shape.num_heads else 0.0
        of_heads = (query + keys + copied) * element_bytes + operators.norm_bytes(query + keys / 2, element_bytes)
    inner = shape.dense_share * shape.ffn_hidden / tensor_parallel
    each = {
        "normed inputs": 2 * operators.norm_bytes(norms_of, element_bytes),
        "query, key before their norms": of_heads,
        "rotary angles": 4.0 * operators.angles * operators.split_angles * element_bytes,
        "dropout masks": 2.0 * norms_of * operators.mask_bytes,
        "activation and gate": 2.0 * inner * element_bytes if shape.gated and operators.split_activation else 0.0,
    }
    return tuple(LayerTensor(name, "cheap", size, 0.0, 2 * size) for name, size in each.items() if size)


def expert_bytes(
    shape: ModelShape,
    element_bytes: int = 2,
    tensor_parallel: int = 1,
    load: float = 1.0,
    operators: LayerOperators = FUSED,
) -> float:
    """Return the bytes that experts save for the backward pass, for each token before the router.

    It is the mean of all layers: 0 without experts, and less if some layers have no experts.

    A token is copied to each of its experts. They save the tensors of an MLP: the input, the first product and the
    output of the activation function; if its operators are split, also the activation, the gate and their product
    before the probability. The projection from latents saves its input. The router saves scores of 4 bytes, and 48
    bytes of places and probabilities for each expert of a token (``MoEAlltoAllTokenDispatcher`` and ``SequentialMLP``
    of Megatron 0.19.2).

    Args:
        shape: sizes of the model.
        element_bytes: bytes of one element.
        tensor_parallel: ranks that share each layer.
        load: tokens at the experts of this rank, over their number in an even spread.
        operators: fused and unfused operators of a layer.
    """
    if not shape.num_expert_layers:
        return 0.0
    gated = 6 if operators.split_activation else 3
    inner = (gated if shape.gated else 2) * element_bytes / tensor_parallel
    in_experts = shape.experts_per_token * shape.token_width * element_bytes + inner * shape.expert_ffn_hidden
    of_router = 48.0 * shape.experts_per_token + 4.0 * shape.num_experts
    return (1.0 - shape.dense_share) * (load * in_experts + of_router + shape.expert_latent * element_bytes)


def expert_working_bytes(
    shape: ModelShape,
    element_bytes: int = 2,
    exchanged: bool = False,
    load: float = 1.0,
    local_experts: int = 1,
    is_split: bool = False,
) -> float:
    """Return the bytes of gradients that exist together in the backward pass of experts, for each token; else 0.

    They are the gradients of the layer's output, of its residual, and of the tokens at their experts. If ranks exchange
    tokens, the latter exist three times, because they are sent and sorted too. While an expert runs, they exist twice,
    together with the gradients inside the expert.

    Args:
        shape: sizes of the model.
        element_bytes: bytes of one element.
        exchanged: ranks share the experts.
        load: see ``expert_bytes``.
        local_experts: experts of a rank, which run one after the other.
        is_split: their activation functions are split.
    """
    if not shape.num_expert_layers:
        return 0.0
    in_expert = INNER_GRADIENTS * load * shape.expert_ffn_hidden / local_experts
    copy = shape.experts_per_token * shape.token_width * (load if exchanged else 1.0)
    routed = 3 * copy if exchanged else copy
    if is_split:
        routed += in_expert
    elif exchanged:
        routed = max(routed, 2 * copy + in_expert)
    return (2 * shape.hidden + routed) * element_bytes
