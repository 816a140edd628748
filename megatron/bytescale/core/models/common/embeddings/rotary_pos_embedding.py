"""RoPE and YaRN by position in the document, for tokens in any order."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron.bytescale.core.packed_seq_params import DocumentSeqParams


def use_document_positions(model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Hook in ``ModelConfig.pre_wrap_hooks``: give each chunk's decoder the angles of its document positions.

    Megatron's own table of angles by row shrinks to one row (``DocumentSeqParams.max_seqlen_q``), so that a context of
    2M tokens needs no large table.
    """
    for chunk in model_chunks:
        if hasattr(chunk, "rotary_pos_emb"):
            hook = partial(use_document_angles, chunk.rotary_pos_emb)
            chunk.decoder.register_forward_pre_hook(hook, with_kwargs=True)  # type: ignore[operator,union-attr]
    return model_chunks


def use_document_angles(
    rotary: RotaryEmbedding, decoder: torch.nn.Module, inputs: tuple[object, ...], kwargs: dict[str, Any]
) -> tuple[tuple[object, ...], dict[str, Any]] | None:
    """Replace Megatron's angles in a decoder's arguments if the arguments contain documents."""
    params = kwargs["packed_seq_params"]
    if not isinstance(params, DocumentSeqParams):
        return None
    assert params.positions is not None, f"{params=}"
    return inputs, {**kwargs, "rotary_pos_emb": document_angles(rotary, params.positions)}


def document_angles(rotary: RotaryEmbedding, positions: torch.Tensor) -> torch.Tensor:
    """Return the angles [t, 1, 1, dim] of positions [t] for the frequencies of Megatron's embedding.

    YaRN's frequencies are its angles at position 1. Megatron's attention applies YaRN's scale of queries and keys.
    """
    if isinstance(rotary, YarnRotaryEmbedding):
        of_yarn = rotary(2)[0][1].to(positions.device)
        return positions.to(of_yarn.dtype)[:, None, None, None] * of_yarn
    scale = 1.0 if rotary.seq_len_interpolation_factor is None else 1.0 / rotary.seq_len_interpolation_factor
    frequencies = rotary.inv_freq.to(positions.device)
    angles = torch.outer(positions.to(frequencies.dtype) * scale, frequencies)
    if rotary.rotary_interleaved:
        angles = angles.repeat_interleave(2, dim=-1)
    else:
        angles = torch.cat((angles, angles), dim=-1)
    return angles[:, None, None, :]
