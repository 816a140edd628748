"""The operators of a layer that are fused kernels, from the arguments of a training."""

from __future__ import annotations

from typing import Any

from bytescale_ext.plan.activation.operators import LayerOperators


def operators_of(args: Any, on_cuda: bool, element_bytes: int) -> LayerOperators:
    """Return the operators that Megatron 0.19.2 builds for these arguments, which request only what the machine has.

    torch has a single kernel for RMSNorm only on GPUs, and a single kernel for LayerNorm everywhere. On GPUs its
    dropout keeps a mask of bytes; on CPU the mask has the dtype of the hidden states. Hybrid data parallelism keeps no
    mask, because its masks are hashes.
    """
    engine = args.transformer_impl == "transformer_engine"
    has_angles = args.position_embedding_type in ("rope", "yarn")
    of_head = getattr(args, "qk_pos_emb_head_dim", 64) if args.multi_latent_attention else args.kv_channels
    return LayerOperators(
        joined_norms=engine,
        split_norms=not engine and not on_cuda and args.normalization == "RMSNorm",
        split_activation=not args.bias_swiglu_fusion,
        angles=int(of_head * args.rotary_percent) if has_angles else 0,
        split_angles=has_angles and not args.apply_rope_fusion,
        qk_norms=args.qk_layernorm and not args.multi_latent_attention,
        mask_bytes=0 if not args.hidden_dropout or args.hybrid_data_parallel else 1 if on_cuda else element_bytes,
    )
