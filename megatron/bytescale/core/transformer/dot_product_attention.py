"""Core attention over documents, rings, slices and samples: the ``core_attention`` of a layer spec."""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.contract import accumulation_dtype
from bytescale_ext.attention.latent import Expansion, Halves
from bytescale_ext.attention.layouts.blocks import PlacedBlock
from bytescale_ext.attention.layouts.layout import AttentionLayout
from bytescale_ext.attention.layouts.rows import CuSeqlens, Rows
from bytescale_ext.attention.layouts.slices import SliceLayout
from bytescale_ext.attention.ring import ring_attention
from bytescale_ext.attention.slices import slice_attention
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict

    from megatron.bytescale.runtime import Runtime


class DocumentAttention(torch.nn.Module):
    """Causal attention inside each document, across the ranks and earlier slices that share it.

    ``runtime`` holds the ring communicator and the kernel; both exist before the first forward. Each tensor-parallel
    rank runs its own heads in its own ring. The module has no state: ``packed_seq_params`` provides the layout and the
    keys and values of earlier slices. Recomputation receives them through its closure, because the schedule may have
    advanced by then. The module's only parameter is a learnable sink, with the same name and place in checkpoints as
    Megatron's.

    Attributes:
        measures_logits: whether training passes raise ``current_max_attn_logits``.
        current_max_attn_logits: largest scaled score of each head of this rank since Megatron last read it, [heads], as
            in Megatron's attention of TransformerEngine; None: no pass yet.
    """

    softmax_offset: torch.Tensor | None
    measures_logits: bool = False
    current_max_attn_logits: torch.Tensor | None = None

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int = 1,
        *,
        runtime: Runtime,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.runtime = runtime
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(config.kv_channels)
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] if has_window else None  # type: ignore[index]
        if config.softmax_type == "learnable":
            self.softmax_offset = learnable_sink(config)
        else:
            sink = None if config.softmax_type == "vanilla" else own_heads(zeros_of_heads(config))
            self.register_buffer("softmax_offset", sink, persistent=False)

    def params_of(self, num_tokens: int, batch: int) -> DocumentSeqParams:
        """Raise AssertionError, because only samples have a layout that is not in ``packed_seq_params``."""
        raise AssertionError("packed_seq_params must hold the layout of documents")

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: DocumentSeqParams | None = None,
    ) -> torch.Tensor:
        """Map query [t, b, heads, dim] and key, value [t, b, kv_heads, dim] to [t, b, heads * dim].

        Documents have a batch of one; samples side by side are concatenated. Communicates on the ring group.
        """
        batch = query.shape[1]
        params = packed_seq_params or self.params_of(query.shape[0], batch)
        if batch == 1:
            q, k, v = (tensor.squeeze(1).contiguous() for tensor in (query, key, value))
            return self.attend(q, k, v, params).flatten(1).unsqueeze(1)
        q, k, v = (tensor.transpose(0, 1).flatten(0, 1).contiguous() for tensor in (query, key, value))
        out = self.attend(q, k, v, params)
        return out.flatten(1).unflatten(0, (batch, out.shape[0] // batch)).transpose(0, 1)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        params: DocumentSeqParams,
        expansion: Expansion | Halves | None = None,
    ) -> torch.Tensor:
        """Return the attention output [t, heads, value_dim] of q [t, heads, dim] with k, v [t, kv_heads, dim].

        With an expansion, ``k`` and ``v`` are two halves (``latent.py``). Communicates on the ring group.
        """
        layout = params.layout if self.window is None else params.window_layout
        assert layout is not None, f"{params=}"
        parts = self.runtime.parts
        assert parts.kernel is not None, "the build of the model chooses the kernel"
        backend = Backend(parts.comm, parts.kernel, self.scale, self.softmax_offset, expansion, self._largest(q))
        if isinstance(layout, SliceLayout):
            assert params.prefix is not None, f"{params=}"
            return slice_attention(q, k, v, params.prefix.layer((self, params.depth)), layout, backend)
        return ring_attention(q, k, v, layout, backend)

    def _largest(self, q: torch.Tensor) -> torch.Tensor | None:
        """Return the largest scores [heads] for a pass to raise, if it trains; ``q``: [t, heads, dim].

        Evaluations and reference policies run without gradients, and recomputed layers run once more with them.
        """
        if not self.measures_logits or not torch.is_grad_enabled():
            return None
        if self.current_max_attn_logits is None:
            heads, dtype = q.shape[1], accumulation_dtype(q.dtype)
            self.current_max_attn_logits = torch.full((heads,), -torch.inf, dtype=dtype, device=q.device)
        return self.current_max_attn_logits

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """Return a sharded checkpoint's entries: a learnable sink is split by heads, as in Megatron's attention."""
        sharded: ShardedStateDict = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=parallel_state.get_tensor_model_parallel_group(),
            dp_cp_group=None if metadata is None else metadata["dp_cp_group"],
        )
        return sharded


def learnable_sink(config: TransformerConfig) -> torch.nn.Parameter:
    """Return the sinks of this rank's heads, [heads], with the initial values that a single process gives them."""
    sinks = zeros_of_heads(config)
    if config.perform_initialization:
        config.init_method(sinks)  # type: ignore[misc]
    parameter = torch.nn.Parameter(own_heads(sinks))
    set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)  # gradient norms count all heads
    return parameter


def zeros_of_heads(config: TransformerConfig) -> torch.Tensor:
    """Return a zero for each head of the model, [heads]."""
    device = torch.cuda.current_device()
    return torch.zeros(config.num_attention_heads, dtype=config.params_dtype, device=device)


def own_heads(of_heads: torch.Tensor) -> torch.Tensor:
    """Return a copy of this tensor-parallel rank's part, [heads], of a value for each head of the model."""
    num_ranks = parallel_state.get_tensor_model_parallel_world_size()
    return of_heads.chunk(num_ranks)[parallel_state.get_tensor_model_parallel_rank()].clone()


class SampleAttention(DocumentAttention):
    """Causal attention inside each of Megatron's samples, with a kernel that does not store the scores.

    Megatron's local attention stores the scores of all pairs of tokens for the backward pass.
    """

    def params_of(self, num_tokens: int, batch: int) -> DocumentSeqParams:
        """Return the layout of ``batch`` samples of ``num_tokens`` tokens."""
        layout = sample_layout(num_tokens, batch, self.window)
        return DocumentSeqParams(layout=layout, window_layout=layout)


@lru_cache(maxsize=16)
def sample_layout(num_tokens: int, batch: int, window: int | None = None) -> AttentionLayout:
    """Return the layout of ``batch`` samples of ``num_tokens`` tokens, one after another."""
    rows = num_tokens * batch
    samples = CuSeqlens.of_lengths([num_tokens] * batch)
    each = list(pairwise(samples.offsets))
    in_window = None if window is None else PlacedBlock.in_window(each, each, window)
    return AttentionLayout(rows, (), 0, samples, Rows.of([(0, rows)]), local_window=in_window)
