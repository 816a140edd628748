"""The router's auxiliary losses over micro-batches with padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bytescale.runtimes import runtime_of
from tests.config.runs import hdp_of, run_of
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

HIDDEN, NUM_EXPERTS, NUM_TOKENS = 8, 4, 7
AUX, Z = 0.5, 0.25


def build(kind: str, group: Any, **settings: Any) -> Any:
    """Return a router, "stock" or "ours", of a model with per-token loss. All routers have equal weights."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.router import TopKRouter

    from megatron.bytescale.core.transformer.moe.router import DocumentRouter

    destroy_moe_metrics_tracker()
    chosen = {"moe_aux_loss_coeff": AUX, "calculate_per_token_loss": True, **settings}
    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, num_moe_experts=NUM_EXPERTS, moe_router_topk=2,
        moe_z_loss_coeff=Z, add_bias_linear=False, use_cpu_initialization=True, **chosen,
    )  # fmt: skip
    groups: Any = SimpleNamespace(tp=group, cp=group, tp_cp=group, tp_dp_cp=group)
    torch.manual_seed(3)
    if kind == "stock":
        router = TopKRouter(config, groups)
    else:
        run = run_of(hdp_of(num_ranks=3, tokens_per_rank=128))
        runtime = runtime_of(run=run)
        runtime.step.batch = SimpleNamespace(num_tokens=NUM_TOKENS)
        router = DocumentRouter(runtime=runtime, config=config, pg_collection=groups)
    router.set_layer_number(1)
    return router.train()


def rows(count: int) -> torch.Tensor:
    """Return hidden states [count, 1, hidden]. A larger count only appends states."""
    return torch.randn((64, 1, HIDDEN), generator=torch.Generator().manual_seed(4))[:count].clone()


def gradient(router: Any, inputs: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return the gradient of only the auxiliary losses. The experts' output has the weight 0."""
    probs, _ = router(inputs, None if mask is None else mask[:, None])
    (probs * 0).sum().backward()
    return router.weight.grad


def weighed_by_labels(rank: int, world: int) -> None:
    """With five labels on 100 tokens, Megatron divides a mean over 100 tokens by 5."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    from megatron.bytescale.runtime import LabelShares

    init_num_microbatches_calculator(0, None, 6, 1, 3)
    mask = torch.arange(10) >= NUM_TOKENS
    plain = build("ours", dist.group.WORLD)
    expected, log = gradient(plain, rows(10), mask), logged(plain)
    few = build("ours", dist.group.WORLD)  # with a new log
    few.runtime.step.label_shares = LabelShares(per_token=torch.tensor(0.05))
    torch.testing.assert_close(gradient(few, rows(10), mask), 0.05 * expected)
    assert logged(few) == pytest.approx(log)


def test_few_labels_do_not_change_the_strength_and_the_log() -> None:
    run_ranks(weighed_by_labels, 1)


def in_half_precision(rank: int, world: int) -> None:
    """Losses are summed in float32, even if logits are in bfloat16."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    init_num_microbatches_calculator(0, None, 6, 1, 3)
    router = build("ours", dist.group.WORLD).bfloat16()
    logits = torch.randn(64, NUM_EXPERTS, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    router.apply_z_loss(logits, padding_mask=torch.zeros(64, dtype=torch.bool))
    exact = torch.logsumexp(logits.detach().double(), -1).square().sum()
    assert logged(router)["z_loss"] == pytest.approx(float(exact) * 6 / NUM_TOKENS, rel=1e-6)


def test_the_z_loss_is_summed_in_float32() -> None:
    run_ranks(in_half_precision, 1)


def logged(router: Any) -> dict[str, float]:
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return {name: float(entry.values[0]) for name, entry in get_moe_metrics_tracker().metrics.items()}


def padding_and_none(rank: int, world: int) -> None:
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    init_num_microbatches_calculator(0, None, 6, 1, 3)
    group = dist.group.WORLD
    stock = build("stock", group)
    expected = gradient(stock, rows(NUM_TOKENS), None)
    means = logged(stock)
    for num_rows in (NUM_TOKENS, 10):
        router = build("ours", group)
        mask = torch.arange(num_rows) >= NUM_TOKENS
        torch.testing.assert_close(gradient(router, rows(num_rows), mask), expected)
        # Megatron's report averages over 3 ranks x 2 micro-batches; here one micro-batch has all tokens of the step.
        assert logged(router) == pytest.approx({name: 6 * mean for name, mean in means.items()})
    empty = gradient(build("ours", group), rows(3), torch.ones(3, dtype=torch.bool))
    assert torch.equal(empty, torch.zeros_like(empty))


def test_padding_has_no_part() -> None:
    run_ranks(padding_and_none, 1)


def losses_of_documents_and_steps(rank: int, world: int) -> None:
    """One document: Megatron's loss of a sequence. Two steps: the second step's loss has the choices of the first."""
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.transformer.moe.moe_utils import compute_routing_scores_for_aux_loss

    from megatron.bytescale.core.transformer.moe.document_loads import DocumentLoads, RoutedRows
    from megatron.bytescale.core.transformer.moe.step_loads import add_step_loads, sum_step_loads

    init_num_microbatches_calculator(0, None, 6, 1, 3)
    group: Any = dist.group.WORLD
    documents = {"moe_router_load_balancing_type": "seq_aux_loss"}
    expected = gradient(build("stock", group, **documents), rows(NUM_TOKENS), None)
    router = build("ours", group, **documents)
    router.runtime.add_parts(comm=SimpleNamespace(rank=0))
    loads = DocumentLoads(torch.tensor([float(NUM_TOKENS)]), (), 1)
    router.runtime.step.routed = RoutedRows(loads, 0, torch.zeros(10, dtype=torch.int64))
    mask = torch.arange(10) >= NUM_TOKENS
    with torch.no_grad():  # the first pass of a recomputed layer counts
        router(rows(10), mask[:, None])
    torch.testing.assert_close(gradient(router, rows(10), mask), expected)
    assert set(logged(router)) == {"seq_load_balancing_loss", "z_loss"}

    router = build("ours", group, moe_router_load_balancing_type="global_aux_loss")
    router.config.moe_z_loss_coeff = None
    assert add_step_loads([router])
    assert not router.last_step_loads.any()
    assert torch.allclose(gradient(router, rows(10), mask), torch.zeros(()), atol=1e-6), "even shares have no gradient"
    assert logged(router)["global_load_balancing_loss"] == pytest.approx(6.0)
    router.zero_grad()
    parallel_state.get_tensor_and_data_parallel_group = lambda **_: group
    sum_step_loads(lambda model: None)([router])
    chosen, scores = compute_routing_scores_for_aux_loss(router.gating(rows(NUM_TOKENS))[:, 0], 2, "softmax")
    assert torch.equal(router.last_step_loads, chosen.sum(0))
    assert not router.running_step_loads.any()
    loss = AUX * NUM_EXPERTS * (scores.sum(0) * chosen.sum(0) / chosen.sum()).sum()
    (expected,) = torch.autograd.grad(loss, router.weight)
    torch.testing.assert_close(gradient(router, rows(10), mask), expected)
    state = router.state_dict()
    assert state.pop("last_step_loads").dtype == torch.int64
    router.load_state_dict(state)  # of a run with another loss


def test_losses_of_documents_and_of_steps() -> None:
    run_ranks(losses_of_documents_and_steps, 1)


def padding_on_one_rank(rank: int, world: int) -> None:
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    init_num_microbatches_calculator(rank, None, 6, 1, 3)
    alone = [dist.new_group([one]) for one in range(world)][rank]
    expected = gradient(build("stock", alone), rows(NUM_TOKENS), None)
    router = build("ours", dist.group.WORLD)
    mine = slice(5 * rank, 5 * rank + 5)
    mask = torch.arange(10) >= NUM_TOKENS
    found = gradient(router, rows(10)[mine], mask[mine])
    dist.all_reduce(found)  # like Megatron for parameters of sequence-parallel layers
    torch.testing.assert_close(found, expected)


def test_padding_on_one_tensor_parallel_rank_changes_no_weight() -> None:
    run_ranks(padding_on_one_rank, 2)


def loads_of_experts(rank: int, world: int) -> None:
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    init_num_microbatches_calculator(0, None, 6, 1, 3)
    settings = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    stock, router = (build(kind, dist.group.WORLD, **settings) for kind in ("stock", "ours"))
    gradient(stock, rows(NUM_TOKENS), None)
    gradient(router, rows(10), torch.arange(10) >= NUM_TOKENS)
    assert router.local_tokens_per_expert.sum() == 2 * NUM_TOKENS
    assert torch.equal(router.local_tokens_per_expert, stock.local_tokens_per_expert)


def test_padding_does_not_move_the_expert_bias() -> None:
    run_ranks(loads_of_experts, 1)
