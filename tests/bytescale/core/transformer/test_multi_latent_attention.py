"""Angles by position inside Megatron's latent attention, and different head sizes of values and keys."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.attention.kernels.table import named_kernel
from bytescale_ext.attention.layouts.layout import attention_layout
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
from tests.bytescale.runtimes import runtime_of
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

LENGTHS = (9, 1, 5)
SIZES = {"narrow": (6, 4), "wide": (4, 6), "equal": (4, 4)}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Return causal attention inside each document, by definition."""
    out = []
    bounds = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    for start, stop in pairwise(bounds):
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) * scale
        unseen = torch.ones(stop - start, stop - start).triu(1).bool()
        weights = scores.masked_fill(unseen, -torch.inf).softmax(-1)
        out.append(torch.einsum("hqk,khd->qhd", weights, v[start:stop]))
    return torch.cat(out).flatten(1)[:, None]


def errors(rank: int, world: int) -> dict[str, list[float]]:
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
    from megatron.bytescale.core.transformer.multi_latent_attention import DocumentLatentCore

    shards = tuple(Shard(seq, ((0, length),), (0,)) for seq, length in enumerate(LENGTHS))
    layout = attention_layout(MicroBatch(shards), 0, LENGTHS, sum(LENGTHS))
    kernel = named_kernel("cpu", torch.float64, 6, "reference")
    config: Any = SimpleNamespace(kv_channels=1, window_size=None, window_attn_skip_freq=None, softmax_type="vanilla")
    core = DocumentLatentCore(config, runtime=runtime_of(kernel=kernel), softmax_scale=0.3)
    found = {}
    for name, (key_dim, value_dim) in SIZES.items():
        generator = torch.Generator().manual_seed(1)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        given = [draw(sum(LENGTHS), 2, dim).requires_grad_() for dim in (key_dim, key_dim, value_dim)]
        weight = draw(sum(LENGTHS), 1, 2 * value_dim)
        out = core(*given, packed_seq_params=DocumentSeqParams(layout=layout))
        wanted = dense(*given, 0.3)
        grads, wanted_grads = (torch.autograd.grad((one * weight).sum(), given) for one in (out, wanted))
        pairs = zip((out, *grads), (wanted, *wanted_grads), strict=True)
        found[name] = [float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs]
        found[f"latent {name}"] = expansion_errors(core, DocumentSeqParams(layout=layout), (key_dim, value_dim))
    return found


def expansion_errors(core: Any, params: Any, sizes: tuple[int, int]) -> list[float]:
    """Return errors of the output and of the gradients of queries, latents and the weight. 2 numbers have positions."""
    (key_dim, value_dim), generator = sizes, torch.Generator().manual_seed(2)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    shapes = (sum(LENGTHS), 2, key_dim), (sum(LENGTHS), 5 + 2), (2 * (key_dim - 2 + value_dim), 5)
    given = q, latents, weight = [draw(shape).requires_grad_() for shape in shapes]
    of_output = draw(sum(LENGTHS), 1, 2 * value_dim)
    contents, v = (latents[:, :5] @ weight.t()).unflatten(1, (2, -1)).split((key_dim - 2, value_dim), -1)
    k = torch.cat((contents, latents[:, None, 5:].expand(-1, 2, -1)), -1)
    pairs = (core(*given, packed_seq_params=params), dense(q, k, v, 0.3))
    grads = [torch.autograd.grad((one * of_output).sum(), given) for one in pairs]
    both = zip((pairs[0], *grads[0]), (pairs[1], *grads[1]), strict=True)
    return [float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in both]


def test_values_have_heads_of_their_own_size() -> None:
    """Value heads may also be expanded from latents inside attention, together with the keys."""
    found = run_ranks(errors, 1, init_group=False)[0]
    assert found.keys() == {*SIZES, *(f"latent {name}" for name in SIZES)}
    for name, of_tensors in found.items():
        assert max(of_tensors) < 1e-10, (name, of_tensors)


def angles(rank: int, world: int) -> list[Any]:
    from megatron.core.models.common.embeddings import RotaryEmbedding, YarnRotaryEmbedding

    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
    from megatron.bytescale.core.transformer.multi_latent_attention import DocumentRotary

    group: Any = torch.distributed.group.WORLD
    positions = torch.tensor([0, 1, 2, 0, 5])
    params = DocumentSeqParams(positions=positions)
    plain = RotaryEmbedding(8, 1.0, cp_group=group, use_cpu_initialization=True)
    yarn = YarnRotaryEmbedding(8, scaling_factor=4.0, mscale_all_dim=0.5, cp_group=group, use_cpu_initialization=True)
    found = []
    for rotary in (plain, yarn):
        ours = DocumentRotary(rotary)
        got = ours(ours.get_rotary_seq_len(None, None, None, None, params))
        rows: Any = rotary(8)
        found.append((got, rows[positions, 0] if rotary is plain else (rows[0][positions, 0], rows[1])))
    return found


def test_angles_are_those_of_megatron_at_each_position() -> None:
    (plain, plain_rows), ((of_yarn, factor), (yarn_rows, wanted)) = run_ranks(angles, 1)[0]
    torch.testing.assert_close(plain, plain_rows)
    torch.testing.assert_close(of_yarn, yarn_rows)
    assert factor == wanted != 1.0
