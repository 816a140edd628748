"""Every policy with every kind of layer, with packed documents and with two samples, on one stage and on two stages.

Two stages run in one process in the order of 1F1B. Their layers share a store, like the chunks of a rank, and a
micro-batch is in flight while another runs. tests/e2e/activation tests real pipelines, rings and slices.
"""

from __future__ import annotations

import functools
import itertools
from functools import partial
from typing import Any

import pytest
import torch

from bytescale_ext.plan.activation.forecast import forecast
from bytescale_ext.plan.activation.load import LayerSettings, Machine, cost_of_rates, layer_load
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.activation.policies import make_plan
from bytescale_ext.plan.cost.model_shape import ModelShape
from megatron.bytescale.runtime import Runtime
from tests.bytescale.runtimes import runtime_of
from tests.harness import run_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

HIDDEN, LAYERS, VOCAB = 32, 4, 61
LENGTHS = (131, 197)  # tokens of two micro-batches; enough rows that products of a part use the same kernels
DOCUMENTS = (0.4, 0.6)
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
}  # fmt: skip
SHARED = {"moe_shared_expert_intermediate_size": 24}
LATENT = {
    "multi_latent_attention": True, "q_lora_rank": None, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6, "rope_type": "rope", "qk_layernorm": True,
}  # fmt: skip
GQA, GATED = {"num_query_groups": 2}, {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"normalization": "LayerNorm", "add_bias_linear": True},
    "grouped swiglu": {**GQA, **GATED},
    "dropout": {**GQA, **GATED, "hidden_dropout": 0.3},
    "experts": {**GQA, **GATED, **EXPERTS},
    "experts, recomputed": {**EXPERTS, "recompute_granularity": "selective", "recompute_modules": ["moe"]},
    "latent": {**LATENT, "q_lora_rank": 12},
    "latent experts": {**LATENT, **GATED, **EXPERTS},
    "experts of latents": {**GQA, **GATED, **EXPERTS, "moe_latent_size": 12, "transformer_impl": "local"},
    "shared experts, recomputed": {
        **EXPERTS, **SHARED, "recompute_granularity": "selective", "recompute_modules": ["shared_experts"],
    },
}  # fmt: skip
DOCUMENTS_ONLY = ("dropout", "latent", "latent experts", "experts of latents")
PLANS = {
    "swap-only": ActivationPlan("shares", 1.0, 0.0, 1.0),
    "keep-attention": ActivationPlan("shares", 0.0, 1.0, 0.0),
    "memo-0": ActivationPlan("memo", 0.0, 1.0, 1.0, False, 2),
    "memo": ActivationPlan("memo", 0.4, 0.6, 1.0, False, 2),
    "memo-1": ActivationPlan("memo", 1.0, 0.0, 1.0, False, 2),
    "priced": ActivationPlan("priced", 0.3, 0.4, 1.0, True, 2),
    "offload": ActivationPlan("offload", 0.5, 0.0, 0.5, False, 2),
}


def plan_of_auto() -> ActivationPlan:
    """Return the plan that ``auto`` chooses with half of the memory."""
    shape = ModelShape(LAYERS, HIDDEN, 4, 2, 8, 48, True, VOCAB)
    load = layer_load(cost_of_rates(shape, 1e12, 1e12, 1e12), LENGTHS[1], LayerSettings(element_bytes=4))
    whole = forecast(ActivationPlan("none"), load, Machine(0.0, 0.0)).device_bytes
    return make_plan("auto", load, Machine(0.7 * whole, whole, 1e9))


def use_dropout(runtime: Runtime, stages: list[Any], drop: float) -> None:
    """Give models the masks of documents, in a process without a command line."""
    from megatron.bytescale.arguments.running import Dropout
    from megatron.bytescale.core.transformer import document_dropout

    document_dropout.current = lambda _: Dropout(drop, seed=5)  # type: ignore[assignment]
    document_dropout.running_step = lambda: 0
    document_dropout.use_document_dropout(runtime, stages)


class Case:
    """Stages of a model of one kind, and the input of a step."""

    def __init__(self, kind: str, documents: bool, stages: int, store: Any) -> None:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer import MLATransformerConfig, TransformerConfig
        from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

        from bytescale_ext.attention.kernels.table import choose_kernel
        from megatron.bytescale.core.models.common.embeddings.rotary_pos_embedding import use_document_positions
        from megatron.bytescale.core.models.gpt.gpt_layer_specs import _set_document_modules
        from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention, SampleAttention
        from megatron.bytescale.core.transformer.norm import LocalNorm
        from megatron.bytescale.core.transformer.transformer_layer import planned_layer_spec

        settings = {"normalization": "RMSNorm", "add_bias_linear": False, "hidden_dropout": 0.0, **KINDS[kind]}
        is_latent = "kv_lora_rank" in settings
        config = (MLATransformerConfig if is_latent else TransformerConfig)(
            num_layers=LAYERS // stages, hidden_size=HIDDEN, num_attention_heads=4, ffn_hidden_size=48,
            attention_dropout=0.0, use_cpu_initialization=True, init_method_std=0.2,
            masked_softmax_fusion=False, apply_rope_fusion=False, bias_dropout_fusion=False, **settings,
        )  # fmt: skip
        spec: Any = get_gpt_layer_local_spec(
            num_experts=settings.get("num_moe_experts"), normalization=settings["normalization"],
            multi_latent_attention=is_latent, qk_layernorm=is_latent,
        )  # fmt: skip
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = LocalNorm
        widths = (12, 6) if is_latent else (HIDDEN // 4, None)
        kernel = choose_kernel(torch.device("cpu"), torch.float32, widths[0], value_dim=widths[1])[0]
        self.runtime = runtime_of(kernel=kernel)
        if is_latent or "moe_latent_size" in settings:
            _set_document_modules(spec.submodules, self.runtime, has_engine=False)
        else:
            spec.submodules.self_attention.submodules.core_attention = partial(
                DocumentAttention if documents else SampleAttention, runtime=self.runtime
            )
        block: Any = TransformerBlockSubmodules(layer_specs=[spec] * (LAYERS // stages), layer_norm=LocalNorm)
        torch.manual_seed(3)
        self.stages = [
            GPTModel(
                config, planned_layer_spec(block, store), VOCAB, 256, pre_process=not i, post_process=i == stages - 1,
                position_embedding_type="rope", share_embeddings_and_output_weights=False,
            ).train()
            for i in range(stages)
        ]  # fmt: skip
        self.documents, self.lengths = documents, LENGTHS
        if documents:
            use_document_positions(self.stages)
        if config.hidden_dropout:
            use_dropout(self.runtime, self.stages, config.hidden_dropout)

    def forward(self, stage: int, index: int, hidden: torch.Tensor | None) -> torch.Tensor:
        """Return a stage's output for a micro-batch; the last stage returns the sum of squared losses."""
        length = self.lengths[index]
        batch = 1 if self.documents else 2
        tokens = torch.randint(VOCAB, (batch, length + 1), generator=torch.Generator().manual_seed(index))
        more: dict[str, Any] = {}
        positions = torch.arange(length)
        if self.documents:
            from bytescale_ext.attention.layouts.layout import attention_layout
            from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard
            from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

            sizes = (round(DOCUMENTS[0] * length), length - round(DOCUMENTS[0] * length))
            shards = tuple(Shard(i, ((0, size),), (0,)) for i, size in enumerate(sizes))
            positions = torch.cat([torch.arange(size) for size in sizes])
            layout = attention_layout(MicroBatch(shards), 0, sizes, length)
            more["packed_seq_params"] = DocumentSeqParams(positions=positions, layout=layout)
        model = self.stages[stage]
        model.set_input_tensor(hidden)
        number = partial(setattr, self.runtime.step, "token_numbers", torch.arange(length) + 1000 * index)
        number()
        result = model(tokens[:, :-1], positions.expand(batch, -1), None, labels=tokens[:, 1:], **more)
        result.register_hook(lambda _: number())
        return result.square().sum() if model.post_process else result

    def step(self) -> list[torch.Tensor]:
        """Run two micro-batches, with 1F1B on two stages; return losses and all gradients."""
        for stage in self.stages:
            stage.zero_grad(set_to_none=True)
        losses = self._pipelined() if len(self.stages) == 2 else [self._whole(index) for index in range(2)]
        gradients = [p.grad for stage in self.stages for p in stage.parameters() if p.grad is not None]
        return [*losses, *gradients]

    def _whole(self, index: int) -> torch.Tensor:
        loss = self.forward(0, index, None)
        loss.backward()
        return loss.detach()

    def _pipelined(self) -> list[torch.Tensor]:
        first = [self.forward(0, 0, None), self.forward(0, 1, None)]
        losses = []
        for index in range(2):
            hidden = first[index].detach().requires_grad_()
            loss = self.forward(1, index, hidden)
            loss.backward()
            first[index].backward(hidden.grad)
            losses.append(loss.detach())
        return losses


def run_matrix(rank: int, world: int, kind: str) -> dict[tuple[bool, int, str], tuple[bool, float, int, int, int]]:
    """Return (equal, largest difference, swapped bytes, recomputed FLOPs, kept bytes) of a kind under each plan."""
    from bytescale_ext.activation.arena import allocate_arena
    from bytescale_ext.activation.link import make_link
    from bytescale_ext.activation.store import ActivationStore
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    plans = {**PLANS, "auto": plan_of_auto()}
    found = {}
    for documents, stages in itertools.product((False, True), (1, 2)):
        if kind in DOCUMENTS_ONLY and not documents:
            continue
        store = ActivationStore(
            ActivationPlan("none"), make_link(allocate_arena(1 << 23, pinned=False), on_cuda=False), LAYERS // stages
        )
        case = Case(kind, documents, stages, store)
        expected = case.step()
        for name, plan in plans.items():
            store.plan = plan if stages == 1 else ActivationPlan(
                plan.policy, plan.swap, plan.recompute, plan.input_swap, plan.rebuild_cheap, 0
            )  # fmt: skip
            got = case.step()
            store.check_empty()
            counts = store.take_counts()
            pairs = list(zip(got, expected, strict=True))
            furthest = max(float((one - other).abs().max() / other.abs().max()) for one, other in pairs)
            is_equal = all(torch.equal(one, other) for one, other in pairs)
            done = counts.swapped_bytes, counts.recomputed_flops, counts.kept_bytes
            found[documents, stages, name] = is_equal, furthest, *done
    return found


def run_fifty_steps(rank: int, world: int) -> dict[str, list[int]]:
    """Return live and peak bytes of tensors, and of the arena, in each of 50 steps of changing lengths."""
    import gc

    from bytescale_ext.activation.arena import allocate_arena
    from bytescale_ext.activation.link import make_link
    from bytescale_ext.activation.store import ActivationStore
    from bytescale_ext.activation.trace import AllocationTrace
    from bytescale_ext.plan.memory.placement import liveness_bound
    from megatron.bytescale import cpu

    cpu.install_if_wanted(["--cpu"])
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    found: dict[str, list[int]] = {"left": [], "most": [], "arena": []}
    store = ActivationStore(PLANS["memo"], make_link(allocate_arena(1 << 23, pinned=False), on_cuda=False), LAYERS)
    case = Case("grouped swiglu", True, 1, store)
    case.step()
    gc.disable()  # memory that only the garbage collector would free counts as live
    for step in range(50):
        case.lengths = (40 + step * 7 % 20, 40 + step * 3 % 20)
        for stage in case.stages:
            stage.zero_grad(set_to_none=False)
        grads = [p.grad for stage in case.stages for p in stage.parameters() if p.grad is not None]
        parameters = [p for stage in case.stages for p in stage.parameters()]
        with AllocationTrace([*parameters, *grads, store.link.arena.memory]) as trace:
            for index in range(2):
                case._whole(index)
            case.runtime.step.token_numbers = None  # kept from micro-batch to micro-batch by design
            trace.begin_pass("nothing", 0)
            trace.end_pass("nothing", 0)
        requests = trace.requests()
        found["left"].append(sum(one.num_bytes for one in requests if one.stop > trace.passes[-1].start))
        found["most"].append(liveness_bound(requests))
        found["arena"].append(store.link.arena.peak_bytes)
        store.check_empty()
    return found


@pytest.mark.full
def test_memory_is_flat_over_fifty_steps_of_changing_lengths() -> None:
    """Steps of equal lengths take equal memory at any time, and leave nothing, without the garbage collector."""
    found = run_ranks(run_fifty_steps, 1)[0]
    assert found["left"] == [0] * 50
    assert found["most"][20:40] == pytest.approx(found["most"][:20], rel=0.01)
    assert len(set(found["most"])) > 5
    assert found["arena"][-1] == found["arena"][20]


@functools.cache
def found_of(kind: str) -> dict[tuple[bool, int, str], tuple[bool, float, int, int, int]]:
    return dict(run_ranks(run_matrix, 1, kind)[0])


@pytest.mark.parametrize("kind", sampled(KINDS, ["latent"]))
def test_gradients_are_bitwise_those_of_no_policy(kind: str) -> None:
    cases = found_of(kind)
    assert len(cases) == (1 if kind in DOCUMENTS_ONLY else 2) * 2 * (len(PLANS) + 1)
    for case, (is_equal, furthest, swapped, recomputed, _) in cases.items():
        assert is_equal, (case, furthest)
        plan = PLANS.get(case[2], None) or plan_of_auto()
        assert (swapped > 0) == (plan.swap + plan.input_swap > 0), case
        assert (recomputed > 0) == (plan.recompute > 0), case
    assert not plan_of_auto().is_off


@pytest.mark.full
def test_masks_take_no_memory() -> None:
    masked, plain = found_of("dropout"), found_of("grouped swiglu")
    for stages, name in itertools.product((1, 2), PLANS):
        assert masked[True, stages, name][2:] == plain[True, stages, name][2:]


@pytest.mark.full
@pytest.mark.parametrize("kind", ["dense", "grouped swiglu"])
def test_two_samples_take_the_memory_of_two_micro_batches(kind: str) -> None:
    """Layers keep no scores and no tensor twice, except the shared angles of positions."""
    for stages, name in itertools.product((1, 2), PLANS):
        samples, documents = (found_of(kind)[documents, stages, name] for documents in (False, True))
        for mine, theirs in ((samples[2], documents[2]), (samples[4], documents[4])):
            assert 1.9 * theirs <= mine <= 2 * theirs, (stages, name)
        assert samples[3] == 2 * documents[3]
