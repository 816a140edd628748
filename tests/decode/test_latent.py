"""Attention over a cache of latents against attention over the keys and values that they expand to, in float64."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from bytescale_ext.attention.kernels.table import choose_kernel
from bytescale_ext.attention.latent import Expansion, latent_halves
from bytescale_ext.decode import latent
from bytescale_ext.decode.attention import CachedLayer, cached_attention
from bytescale_ext.decode.latent import latent_attention
from bytescale_ext.decode.tree import TokenTree

HEADS, CONTENT, VALUE, POSITION, RANK = 4, 6, 5, 2, 7
chosen_kernel = cache(choose_kernel)
TREE = TokenTree((0, 1, 2, 3, 4, 5), (-1, 0, 0, 1, 1, 4))


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("window", [None, 3, 20, 200])
@pytest.mark.parametrize("length", [0, 1, 37])
@pytest.mark.parametrize("num_new", [None, 1, 7, 80])
def test_latents_are_keys_and_values(
    num_new: int | None, length: int, window: int | None, with_sink: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New tokens are a tree, or a slice that reads latents or expands them in parts."""
    monkeypatch.setattr(latent, "EXPANDED_ROWS", 16)
    monkeypatch.setattr(latent, "MOST_SCORES", 16 * HEADS * 7)
    generator = torch.Generator().manual_seed(length)
    visible = TREE.visible() if num_new is None else None
    count = num_new or len(TREE.tokens)
    sizes = (count, HEADS, CONTENT + POSITION), (length + count, RANK + POSITION), (HEADS * (CONTENT + VALUE), RANK)
    q, latents, weight = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    expansion = Expansion(weight, (CONTENT, VALUE), POSITION)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64) if with_sink else None
    kernel = chosen_kernel("cpu", torch.float64, CONTENT + POSITION, windows=True, value_dim=VALUE)[0]
    layer = CachedLayer(kernel, 0.3, window, sink)
    found = latent_attention(q, latents, visible, layer, expansion)
    expected = cached_attention(q, *expansion.expand(*latent_halves(latents)), visible, layer)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_few_tokens_expand_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Expansion, "expand_whole", lambda *_: pytest.fail("latents were expanded"))
    expansion = Expansion(torch.randn(HEADS * (CONTENT + VALUE), RANK), (CONTENT, VALUE), POSITION)
    layer = CachedLayer(choose_kernel("cpu", torch.float32, CONTENT + POSITION)[0], 0.3)
    q, latents = torch.randn(1, HEADS, CONTENT + POSITION), torch.randn(100, RANK + POSITION)
    assert latent_attention(q, latents, None, layer, expansion).shape == (1, HEADS, VALUE)
