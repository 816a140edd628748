"""Factors of rows against Megatron's own arithmetic, and shards of float32 copies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron.bytescale.core.optimizer import qk_clip
from megatron.bytescale.core.optimizer.qk_clip import MainWeight, clipped_rows, scale_weight, shrinkage

ALPHA, THRESHOLD = 0.3, 10.0
LARGEST = torch.tensor([9.0, 12.0, 30.0, 10.0])
HIDDEN = 6


def weight_of(rows: int, dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    torch.manual_seed(rows)
    return torch.nn.Parameter(torch.randn(rows, HIDDEN).to(dtype))


def config_of(**more: object) -> SimpleNamespace:
    common = {"qk_clip_alpha": ALPHA, "qk_clip_threshold": THRESHOLD, "tensor_model_parallel_size": 1}
    return SimpleNamespace(**{"num_attention_heads": 4, "attention_output_gate": False, **common, **more})


def grouped(groups: int, dtype: torch.dtype = torch.float32) -> Any:
    """Return attention of 4 heads of 3 numbers with a number of groups."""
    config = config_of(num_query_groups=groups, kv_channels=3)
    return SimpleNamespace(config=config, linear_qkv=SimpleNamespace(weight=weight_of((4 + 2 * groups) * 3, dtype)))


def latent(query_rank: int | None) -> Any:
    """Return latent attention of 4 heads: 3 numbers without positions, 2 with positions, values of 4."""
    attention = MLASelfAttention.__new__(MLASelfAttention)
    torch.nn.Module.__init__(attention)
    attention.config = config_of(qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=4, q_lora_rank=query_rank)
    attention.num_attention_heads_per_partition = 4
    for name, rows in (("linear_q_proj", 20), ("linear_q_up_proj", 20), ("linear_kv_up_proj", 28)):
        module = torch.nn.Module()
        module.weight = weight_of(rows)
        setattr(attention, name, module)
    return attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_queries_shrink_as_in_megatron(groups: int, dtype: torch.dtype) -> None:
    attention = grouped(groups, dtype)
    eta = torch.clamp(THRESHOLD / LARGEST.view(groups, -1).amax(1), max=1.0).view(-1, 1, 1)
    of_megatron: Any = SimpleNamespace(
        num_query_groups_per_partition=groups,
        query_projection_size=12,
        kv_projection_size=3 * groups,
        qk_clip_balancing_eta=eta,
        config=attention.config,
    )
    weight = attention.linear_qkv.weight
    wanted = SelfAttention._clip_linear_qkv(of_megatron, weight.detach().clone())
    ((found, rows),) = clipped_rows(attention, LARGEST)
    assert found is weight
    scale_weight(weight, rows, {})
    assert torch.equal(weight.detach(), wanted)


@pytest.mark.parametrize("query_rank", [None, 7])
def test_latent_queries_and_keys_shrink_as_in_megatron(query_rank: int | None) -> None:
    attention = latent(query_rank)
    attention.qk_clip_balancing_eta = torch.clamp(THRESHOLD / LARGEST, max=1.0).view(-1, 1, 1)
    queries = attention.linear_q_up_proj if query_rank else attention.linear_q_proj
    wanted = [
        attention._clip_q_proj_weight(queries.weight.detach().clone()),
        attention._clip_kv_proj_weight(attention.linear_kv_up_proj.weight.detach().clone()),
    ]
    pairs = list(clipped_rows(attention, LARGEST))
    assert [weight for weight, _ in pairs] == [queries.weight, attention.linear_kv_up_proj.weight]
    for (weight, rows), expected in zip(pairs, wanted, strict=True):
        scale_weight(weight, rows, {})
        assert torch.equal(weight.detach(), expected)


def test_a_gate_keeps_its_rows() -> None:
    config = config_of(num_query_groups=2, kv_channels=3, attention_output_gate=True)
    attention: Any = SimpleNamespace(config=config, linear_qkv=SimpleNamespace(weight=weight_of(36)))
    ((_, rows),) = clipped_rows(attention, LARGEST)
    first, second = rows.factors.view(2, 18)  # of a group: queries 6, gate 6, keys 3, values 3
    eta = THRESHOLD / 12
    wanted = torch.tensor([eta**ALPHA] * 6 + [1.0] * 6 + [eta ** (1 - ALPHA)] * 3 + [1.0] * 3)
    torch.testing.assert_close(first, wanted)
    assert second[0] < first[0]


def test_ranks_that_share_a_group_scale_their_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one group on two tensor-parallel ranks, a rank has 9 of the 18 rows, also keys and values on the second."""
    ((_, whole),) = clipped_rows(grouped(1), LARGEST)
    for rank in range(2):
        attention = grouped(1)
        attention.config.tensor_model_parallel_size = 2
        attention.linear_qkv.weight = weight_of(9)
        monkeypatch.setattr(qk_clip, "gather_from_tensor_model_parallel_region", lambda largest: LARGEST)
        monkeypatch.setattr(qk_clip.parallel_state, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
        ((_, rows),) = clipped_rows(attention, LARGEST[2 * rank : 2 * rank + 2])
        assert torch.equal(rows.factors, whole.factors[9 * rank : 9 * rank + 9])


def test_only_finite_logits_above_the_threshold_shrink() -> None:
    """Megatron would make weights zero or NaN: in a skipped step, and next to a head with a negative maximum."""
    values = torch.tensor([torch.inf, torch.nan, -torch.inf, -3.0, 10.0, 20.0])
    assert shrinkage(values, THRESHOLD).tolist() == [1.0, 1.0, 1.0, 1.0, 1.0, 0.5]


@pytest.mark.parametrize("start", [0, 4, 17])
def test_a_shard_of_the_copy_follows(start: int) -> None:
    attention = grouped(2)
    weight = attention.linear_qkv.weight
    shard = weight.detach().view(-1)[start : start + 50].clone()
    main = MainWeight(SimpleNamespace(), shard, start)  # type: ignore[arg-type]
    ((_, rows),) = clipped_rows(attention, LARGEST)
    scale_weight(weight, rows, {weight: main})
    assert torch.equal(shard, weight.detach().view(-1)[start : start + 50])
    assert not torch.equal(weight.detach(), weight_of(24))


def test_processes_that_share_a_weight_scale_it_once() -> None:
    attention = grouped(2)
    weight, alone = attention.linear_qkv.weight, grouped(2).linear_qkv.weight
    ((_, rows),) = clipped_rows(attention, LARGEST)
    scale_weight(alone, rows, {})
    for position in range(3):
        node: Any = SimpleNamespace(own=lambda size, of=position: slice(of * size // 3, (of + 1) * size // 3))
        scale_weight(weight, rows, {}, node)
    assert torch.equal(weight, alone)
