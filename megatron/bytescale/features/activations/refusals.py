"""Megatron settings that activation policies refuse."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bytescale.arguments.conditions import IS_LOCAL, above, equals, given, where
from megatron.bytescale.arguments.layer_settings import QueryGroups, Windows
from megatron.bytescale.arguments.refusals import refuse


@dataclass(frozen=True)
class _Recomputation:
    """Megatron's own settings of recomputation."""

    recompute_granularity: str | None
    recompute_modules: list[str] | None

    def is_beyond_experts(self) -> bool:
        """Return whether more is recomputed than parts of experts, which policies leave alone."""
        if self.recompute_granularity == "full":
            return True
        modules = set(self.recompute_modules or ["core_attn"])
        return bool(self.recompute_granularity and not modules <= {"moe", "moe_act", "shared_experts"})


_NO_GRAPH = "remove it: a graph's memory cannot be swapped"
_NOT_STANDARD = "remove it: its layers are not Megatron's TransformerLayer"
_PLAIN_CAUSAL = "remove it, or use --transformer-impl transformer_engine: policies run local layers with our attention"
_SECOND_SWAP = "choose one: the policy also swaps"
_LOOK_BACK = "give --window-size N,0 with N above 0: each token attends to itself and up to N earlier tokens"
REFUSALS = (
    refuse("--context-parallel-size > 1 of local layers", "activations", "use --hybrid-data-parallel in its place",
           IS_LOCAL & above("context_parallel_size", 1)),
    refuse("--overlap-moe-expert-parallel-comm", "activations", "remove it: it runs its own schedule"),
    refuse("--moe-paged-stash", "activations", "choose one: it also moves activations"),
    refuse("--cuda-graph-impl", "activations", _NO_GRAPH, ~equals("cuda_graph_impl", "none")),
    refuse("--enable-cuda-graph", "activations", _NO_GRAPH),
    refuse("--external-cuda-graph", "activations", _NO_GRAPH),
    refuse("--use-megatron-fsdp", "activations", "use --use-distributed-optimizer"),
    refuse("--use-torch-fsdp2", "activations", "use --use-distributed-optimizer"),
    refuse("--multi-latent-attention without --hybrid-data-parallel", "activations", "add --hybrid-data-parallel: "
           "policies know the tensors of its latent attention",
           given("multi_latent_attention") & ~given("hybrid_data_parallel")),
    refuse("--mtp-num-layers without --hybrid-data-parallel", "activations", "add --hybrid-data-parallel, whose loader "
           "provides later tokens", given("mtp_num_layers") & ~given("hybrid_data_parallel")),
    refuse("--experimental-attention-variant", "activations", _NOT_STANDARD),
    refuse("--heterogeneous-layers-config-path", "activations", _NOT_STANDARD),
    refuse("--heterogeneous-layers-config-encoded-json", "activations", _NOT_STANDARD),
    refuse("--enable-mhc-connections", "activations", _NOT_STANDARD),
    refuse("--spec", "activations", _NOT_STANDARD),
    refuse("--apply-query-key-layer-scaling of local layers", "activations", _PLAIN_CAUSAL,
           IS_LOCAL & given("apply_query_key_layer_scaling")),
    refuse("--reset-attention-mask of local layers", "activations", _PLAIN_CAUSAL,
           IS_LOCAL & given("reset_attention_mask")),
    refuse("--window-size other than N,0 of local layers", "activations", _LOOK_BACK,
           IS_LOCAL & where(Windows, Windows.look_elsewhere)),
    refuse("--num-query-groups", "activations", "make it a divisor of --num-attention-heads",
           given("group_query_attention") & where(QueryGroups, QueryGroups.are_uneven)),
    refuse("--attention-dropout > 0", "activations", "give 0: recomputation must repeat the first results",
           above("attention_dropout", 0)),
    refuse("--hidden-dropout > 0 without --hybrid-data-parallel", "activations", "add it, because its masks can be "
           "computed again, or give 0", above("hidden_dropout", 0) & ~given("hybrid_data_parallel")),
    refuse("--recompute-granularity", "activations", "choose one: the policy also recomputes; only the "
           "--recompute-modules of experts work with it",
           given("recompute_activations") | where(_Recomputation, _Recomputation.is_beyond_experts)),
    refuse("--mlp-chunks-for-training", "activations", "remove it", above("mlp_chunks_for_training", 1)),
    refuse("--fp8-format", "activations", "use bf16", given("fp8")),
    refuse("--fp4-format", "activations", "use bf16", given("fp4")),
    refuse("--fine-grained-activation-offloading", "activations", _SECOND_SWAP),
    refuse("--cpu-offloading-num-layers", "activations", _SECOND_SWAP),
)  # fmt: skip
