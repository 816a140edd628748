"""Draft heads and their loss in float64, against formulas written out for one token at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.config.drafts import DraftConfig
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

HIDDEN, ATTENTION_HEADS, VOCAB, TOKENS, HEADS = 8, 2, 11, 9, 3
DOCUMENTS = ((0, 6), (6, 9))
DECAY, HIDDEN_WEIGHT = 0.5, 0.25


def made(kind: str) -> Any:
    """Return heads with random weights, and the inputs of a micro-batch of two documents."""
    from megatron.core.transformer import TransformerConfig

    from megatron.bytescale.core.models.gpt.draft_heads import DraftHeads

    config = TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=ATTENTION_HEADS, normalization="RMSNorm",
        use_cpu_initialization=True, params_dtype=torch.float64,
    )  # fmt: skip
    torch.manual_seed(1)
    settings = DraftConfig(kind, HEADS, 0, DECAY, HIDDEN_WEIGHT)
    heads = DraftHeads(config, settings, None).double()  # type: ignore[arg-type]
    for parameter in heads.parameters():
        parameter.data.add_(torch.randn_like(parameter))
    tokens = torch.randint(VOCAB, (TOKENS,))
    hidden = torch.randn(TOKENS, 1, HIDDEN, dtype=torch.float64)
    after = torch.randn(TOKENS, 1, HIDDEN, dtype=torch.float64) * 2  # the model's last norm
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64)
    return heads, tokens, hidden, after, weight


def rms(x: torch.Tensor, norm: Any) -> torch.Tensor:
    return x / (x.square().mean() + norm.eps).sqrt() * norm.weight


def merged(x: torch.Tensor, e: torch.Tensor, merge: Any) -> torch.Tensor:
    q, k, v = merge.query.weight @ rms(x, merge.norm), merge.key.weight @ e, merge.value.weight @ e
    size, out = HIDDEN // ATTENTION_HEADS, x.clone()
    for head in range(ATTENTION_HEADS):
        part = slice(head * size, (head + 1) * size)
        out[part] = x[part] + (q[part] @ k[part]) / (q[part].norm() * k[part].norm()) * v[part]
    return out


def guesses(kind: str, heads: Any, x: torch.Tensor, after: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return each head's input to the output layer for a token; ``after``: tokens after the token's label."""
    if kind == "medusa":
        x = rms(x, heads.norm)
        return [x + torch.nn.functional.silu(block.weight @ x) for block in heads.blocks]
    state = rms(merged(x, after[0], heads.start), heads.norm)
    found = [rms(heads.first.weight @ state, heads.head_norm)]
    for e in after[1:]:
        state = merged(state, e, heads.step)
        found.append(rms(heads.later.weight @ torch.cat((state, e)), heads.head_norm))
    return found


def compare(rank: int, world: int, kind: str, chunk_tokens: int | None) -> tuple[list[float], list[float], float]:
    """Return the sums of the loss, the sums by the formulas, and the largest difference of a gradient."""
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from bytescale_ext.attention.layouts.layout import attention_layout
    from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
    from megatron.bytescale.core.models.gpt.draft_loss import DraftLoss
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

    heads, tokens, hidden, last, weight = made(kind)
    labels, future = torch.zeros(TOKENS, dtype=torch.int64), torch.full((TOKENS, HEADS), -1)
    for start, stop in DOCUMENTS:
        labels[start : stop - 1] = tokens[start + 1 : stop]
        for ahead in range(HEADS):
            future[start : max(start, stop - 2 - ahead), ahead] = tokens[start + 2 + ahead : stop]

    class Output:
        tp_group = SimpleNamespace(rank=lambda: 0, size=lambda: 1)

        def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x @ weight.T, None

    def loss_of(target: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.permute(1, 2, 0), target, reduction="none")

    trunk: Any = SimpleNamespace(hidden=hidden, chunk=object(), is_frozen=True)
    parts = [Shard(seq, ((0, stop - start),), (0,)) for seq, (start, stop) in enumerate(DOCUMENTS)]
    layout = attention_layout(MicroBatch(tuple(parts)), 0, [stop - start for start, stop in DOCUMENTS], TOKENS)
    sums = DraftLoss(trunk, heads, chunk_tokens)(
        output_layer=Output(), output_weight=weight, labels=labels[None], compute_language_model_loss=loss_of,
        packed_seq_params=DocumentSeqParams(positions=torch.arange(TOKENS), future=future, layout=layout),
        scale_logits=lambda x: x, hidden_states=last,
    )  # fmt: skip
    sums[0].backward()
    grads = {name: parameter.grad.clone() for name, parameter in heads.named_parameters()}
    heads.zero_grad()
    loss, counts, right, accepted, difference = by_formulas(kind, heads, tokens, (hidden, last), weight)
    loss.backward()
    worst = max(float((grads[name] - parameter.grad).abs().max()) for name, parameter in heads.named_parameters())
    return sums.tolist(), [float(loss), *counts, *right, accepted, float(difference)], worst


def smooth_l1(guess: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return differences relative to the root mean square of the target, which is float32."""
    scale = target.float().square().mean().sqrt()
    off = (guess.float() / scale - target.float() / scale).abs()
    return torch.where(off < 1, off.square() / 2, off - 0.5).mean()


def by_formulas(kind: str, heads: Any, tokens: Any, states: Any, weight: Any) -> Any:
    (hidden, last), difference = states, torch.zeros(())
    loss, counts, right, accepted = torch.zeros((), dtype=torch.float64), [0] * HEADS, [0] * HEADS, 0
    for start, stop in DOCUMENTS:
        for place in range(start, stop - 1):
            known = [weight[tokens[min(place + 1 + i, stop - 1)]] for i in range(HEADS)]
            in_row = True
            for index, guess in enumerate(guesses(kind, heads, hidden[place, 0], known)):
                if place + 1 + index < stop:
                    difference = difference + DECAY**index * smooth_l1(guess, last[place + 1 + index, 0])
                if place + 2 + index < stop:
                    target, logits = int(tokens[place + 2 + index]), weight @ guess
                    loss = loss - DECAY**index * logits.log_softmax(-1)[target]
                    counts[index] += 1
                    hit = int(logits.argmax()) == target
                    right[index] += hit
                    in_row = in_row and hit
                    accepted += in_row
    return loss + HIDDEN_WEIGHT * difference, counts, right, accepted, difference


@pytest.mark.parametrize(("kind", "chunk_tokens"), [("clover", None), ("clover", 2), ("medusa", 100)])
def test_heads_and_loss_follow_the_formulas(kind: str, chunk_tokens: int | None) -> None:
    sums, wanted, difference = run_ranks(compare, 1, kind, chunk_tokens)[0]
    assert sums == pytest.approx(wanted, rel=1e-6)  # sums are float32 if losses are
    assert difference < 1e-6  # the difference from the model's states is float32; without it below 1e-10


def embedded(rank: int, world: int, scatter: bool) -> torch.Tensor:
    from megatron.bytescale.core.models.gpt.draft_heads import embed_by_output

    whole = torch.arange(6.0 * 3).view(6, 3)
    group: Any = torch.distributed.group.WORLD
    tokens = torch.tensor([[0, 5, 3, 2]])
    return embed_by_output(tokens, whole.chunk(world)[rank].requires_grad_(), group, scatter)


@pytest.mark.parametrize("scatter", [False, True])
def test_embeddings_by_an_output_layer_that_is_cut(scatter: bool) -> None:
    parts = run_ranks(embedded, 2, scatter)
    wanted = torch.arange(6.0 * 3).view(6, 3)[[0, 5, 3, 2]].unsqueeze(1)
    for rank, part in enumerate(parts):
        assert not part.requires_grad
        assert torch.equal(part, wanted.chunk(2)[rank] if scatter else wanted)


def begun(rank: int, world: int, is_gated: bool) -> torch.Tensor:
    """Return the weight of the first product of a layer that begins without its MLP, [8 / ranks, 3]."""
    from megatron.core import parallel_state

    from megatron.bytescale.core.models.gpt.draft_heads import begin_without_mlp

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    layer = torch.nn.Module()
    layer.mlp = torch.nn.ModuleDict(
        {"linear_fc1": torch.nn.Linear(3, 8 // world), "linear_fc2": torch.nn.Linear(4 // world, 3)}
    )
    begin_without_mlp(layer, "layer0", is_gated)
    assert not layer.get_submodule("mlp.linear_fc2").weight.any()  # type: ignore[operator, union-attr]
    weight: torch.Tensor = layer.get_submodule("mlp.linear_fc1").weight  # type: ignore[assignment]
    return weight.detach()


@pytest.mark.parametrize("is_gated", [True, False])
def test_layers_begin_alike_on_tensor_parallel_ranks(is_gated: bool) -> None:
    (whole,) = run_ranks(begun, 1, is_gated)
    assert whole.std() > 0
    parts = zip(*(half.chunk(2) for half in (whole.chunk(2) if is_gated else [whole])), strict=True)
    for found, expected in zip(run_ranks(begun, 2, is_gated), parts, strict=True):
        assert torch.equal(found, torch.cat(expected))


def layers_below(rank: int, world: int) -> tuple[list[bool], list[str]]:
    """Return whether each layer has experts, and the MLPs of heads on a model of experts and on one with both kinds."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron.bytescale.core.models.gpt.gpt_layer_specs import dense_layer_spec
    from megatron.bytescale.core.transformer.spec_utils import has_experts
    from megatron.bytescale.core.transformer.transformer_layer import _with_hook_points

    sparse, dense = (
        ModuleSpec(module=torch.nn.Module, submodules=get_gpt_layer_local_submodules(num_experts=count))
        for count in (2, None)
    )
    sparse.submodules = _with_hook_points(sparse.submodules)
    both = TransformerBlockSubmodules(layer_specs=[sparse, dense])
    found = [dense_layer_spec(sparse, False), dense_layer_spec(both, False)]
    assert found[1] is dense
    assert found[0].submodules.self_attention is sparse.submodules.self_attention
    kinds = [one.submodules.mlp.func.__qualname__ for one in found]
    return [has_experts(one.submodules) for one in (sparse, dense, *found)], kinds


def test_layers_of_heads_are_dense() -> None:
    assert run_ranks(layers_below, 1) == [([True, False, False, False], ["MLP.as_mlp_submodule"] * 2)]
