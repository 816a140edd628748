"""FlashAttention 3 on ghost GPUs: the two functions that we call, with the recorded names of their parameters."""

from tests.ghost import flash


def _flash_attn_forward(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, num_splits=1,
):  # fmt: skip
    out, lse, *_ = flash.forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False, scale=softmax_scale,
        window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
    return out, lse, None, None


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
    softcap=0.0, deterministic=False,
):  # fmt: skip
    found = flash.backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, is_causal, None,
        None, scale=softmax_scale, window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
    for target, gradient in zip((dq, dk, dv), found, strict=True):
        target.copy_(gradient)
