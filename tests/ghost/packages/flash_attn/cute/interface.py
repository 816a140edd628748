"""FlashAttention 4 on ghost GPUs: the two functions that we call, with the recorded names of their parameters."""

from tests.ghost import flash


def _flash_attn_fwd(
    q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None, num_splits=1, return_lse=False,
    seqused_k=None, page_table=None, out=None,
):  # fmt: skip
    assert return_lse
    assert -1 not in (window_size_left, window_size_right), "no window is None here"
    out, lse, *_ = flash.forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, False, scale=softmax_scale,
        window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
    return out, lse, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    deterministic=False, dq=None, dk=None, dv=None,
):  # fmt: skip
    found = flash.backward(
        dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, causal, None, None,
        scale=softmax_scale, window_size_left=window_size_left, window_size_right=window_size_right,
    )  # fmt: skip
    for target, gradient in zip((dq, dk, dv), found, strict=True):
        target.copy_(gradient)
    return dq, dk, dv
