"""Every setting of Megatron's that hybrid data parallelism does not run with, by name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.bytescale.core.transformer.moe.expert_ranks import ranks_that_share_experts


@dataclass(frozen=True)
class Refusal:
    """One combination that hybrid data parallelism does not run."""

    flag: str
    applies: Callable[[Any], bool]
    instead: str


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _above(name: str, limit: float) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 0) > limit


def _refuse(flag: str, instead: str, applies: Callable[[Any], bool] | None = None) -> Refusal:
    return Refusal(flag, applies or _is_set(flag.lstrip("-").replace("-", "_")), instead)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


_REMOVE = "remove it, or train without --hybrid-data-parallel"
REFUSALS: tuple[Refusal, ...] = (
    _refuse(
        "--context-parallel-size > 1",
        "leave it at 1: --hybrid-data-parallel gives each document its own width",
        _above("context_parallel_size", 1),
    ),
    _refuse("--hybrid-context-parallel", "choose one: --hybrid-data-parallel takes its place"),
    _refuse("--microbatch-group-size-per-virtual-pipeline-stage", "give at least --pipeline-model-parallel-size",
            lambda a: (a.microbatch_group_size_per_vp_stage or 1 << 30) < a.pipeline_model_parallel_size),
    _refuse("--defer-embedding-wgrad-compute", "its buffers count on micro-batches of one size"),
    _refuse("--overlap-param-gather-with-optimizer-step", "give --overlap-param-gather alone: all gathers start with "
            "the step"),
    _refuse("--num-experts under tensor parallelism", "add --sequence-parallel, which Megatron's experts need there",
            lambda a: a.num_experts and a.tensor_model_parallel_size > 1 and not a.sequence_parallel),
    _refuse("--moe-token-dispatcher-type allgather", "use alltoall: data-parallel ranks that share experts have "
            "different numbers of tokens, and allgather needs equal ones",
            lambda a: a.moe_token_dispatcher_type == "allgather" and ranks_that_share_experts(a) > 1),
    _refuse("--moe-token-dispatcher-type flex", "use alltoall", lambda a: a.moe_token_dispatcher_type == "flex"),
    _refuse("--moe-router-load-balancing-type", "use aux_loss or none, and --moe-router-enable-expert-bias if wanted: "
            "the others need statistics of whole documents, or of all ranks, inside a layer",
            lambda a: bool(a.num_experts and set(_as_list(a.moe_router_load_balancing_type)) - {"aux_loss", "none"})),
    _refuse("--moe-expert-capacity-factor", "which tokens are dropped would depend on the plan",
            lambda a: a.moe_expert_capacity_factor is not None),
    _refuse("--overlap-moe-expert-parallel-comm", "it has a schedule of its own, which knows no planned steps"),
    _refuse("--moe-paged-stash", _REMOVE),
    _refuse("--moe-enable-routing-replay", _REMOVE),
    _refuse("--moe-use-upcycling", _REMOVE),
    _refuse("--moe-latent-size", _REMOVE),
    _refuse("--cuda-graph-impl", "micro-batches change their shape", lambda a: a.cuda_graph_impl != "none"),
    _refuse("--enable-cuda-graph", "micro-batches change their shape"),
    _refuse("--external-cuda-graph", "micro-batches change their shape"),
    _refuse("--optimizer-cuda-graph", _REMOVE),
    _refuse("--use-megatron-fsdp", "use --use-distributed-optimizer: FSDP needs equal micro-batch counts"),
    _refuse("--use-torch-fsdp2", "use --use-distributed-optimizer: FSDP needs equal micro-batch counts"),
    _refuse("--num-distributed-optimizer-instances > 1", _REMOVE, _above("num_distributed_optimizer_instances", 1)),
    _refuse("--tensor-parallel-num-weight-shards", _REMOVE),
    _refuse("--tp-comm-overlap", "its buffers have one fixed shape"),
    _refuse("--multi-latent-attention", _REMOVE),
    _refuse("--mtp-num-layers", _REMOVE),
    _refuse("--experimental-attention-variant", _REMOVE),
    _refuse("--hybrid-layer-pattern", _REMOVE),
    _refuse("--hybrid-override-pattern", _REMOVE),
    _refuse("--heterogeneous-layers-config-path", _REMOVE),
    _refuse("--heterogeneous-layers-config-encoded-json", _REMOVE),
    _refuse("--spec", "--hybrid-data-parallel brings its own layer spec"),
    _refuse("--transformer-impl inference_optimized", "use local or transformer_engine",
            lambda a: a.transformer_impl == "inference_optimized"),
    _refuse("--apply-layernorm-1p", "it needs TransformerEngine",
            lambda a: a.layernorm_zero_centered_gamma and a.transformer_impl == "local"),
    _refuse("--num-query-groups", "make it a divisor of --num-attention-heads",
            lambda a: a.group_query_attention and a.num_attention_heads % (a.num_query_groups or 1)),
    _refuse("--attention-backend", "choose with --hdp-attention-kernel", lambda a: a.attention_backend.name != "auto"),
    _refuse("--use-kitchen-attention", "choose with --hdp-attention-kernel"),
    _refuse("--max-seqlen-per-dp-cp-rank", "give --hdp-tokens-per-rank"),
    _refuse("--window-size", "sliding-window attention is not supported"),
    _refuse("--softmax-type", "use vanilla", lambda a: getattr(a, "softmax_type", "vanilla") != "vanilla"),
    _refuse("--attention-dropout > 0", "add --attention-dropout 0 (Megatron's default is 0.1)",
            _above("attention_dropout", 0)),
    _refuse("--apply-query-key-layer-scaling", _REMOVE),
    _refuse("--qk-clip", _REMOVE),
    _refuse("--log-max-attention-logit", _REMOVE),
    _refuse("--position-embedding-type", "use rope, learned_absolute or none",
            lambda a: a.position_embedding_type not in ("rope", "learned_absolute", "none")),
    _refuse("--fp8-format", "use bf16: FP8 needs aligned token counts", _is_set("fp8")),
    _refuse("--fp4-format", "use bf16: FP4 needs aligned token counts", _is_set("fp4")),
    _refuse("--te-precision-config-file", "it may choose FP8, which needs aligned token counts"),
    _refuse("--fine-grained-activation-offloading", _REMOVE),
    _refuse("--cpu-offloading-num-layers", _REMOVE),
    _refuse("--rampup-batch-size", "steps are planned ahead with one batch size"),
    _refuse("--step-batch-size-schedule", "steps are planned ahead with one batch size"),
    _refuse("--decrease-batch-size-if-needed", _REMOVE),
    _refuse("--iterations-to-skip", _REMOVE),
    _refuse("--phase-transition-iterations", _REMOVE),
    _refuse("--full-validation", "use --eval-iters"),
    _refuse("--multiple-validation-sets", _REMOVE),
    _refuse("--sft", _REMOVE),
    _refuse("--fim-data", _REMOVE),
    _refuse("--mock-data", "build a corpus with `bytescale corpus`"),
    _refuse("--per-dataset-sequences-path", "lengths come from the .idx files"),
    _refuse("--dataloader-fast-cache-load", "document samples keep no index cache"),
    _refuse("--dataloader-defer-npy-index-mmap", "document samples keep no index cache"),
    _refuse("--dataloader-inter-document-masking", "documents never attend to each other here"),
    _refuse("--reset-position-ids", "positions always start anew with each document here"),
    _refuse("--reset-attention-mask", "documents never attend to each other here"),
    _refuse("--eod-mask-loss", "the last token of a document never has a label here"),
    _refuse("--dataloader-type cyclic", _REMOVE, lambda a: a.dataloader_type == "cyclic"),
    _refuse("--micro-batch-size > 1", "leave it at 1: documents are packed by tokens", _above("micro_batch_size", 1)),
    _refuse("--eval-micro-batch-size > 1", "leave it at 1", _above("eval_micro_batch_size", 1)),
    _refuse("--no-align-param-gather", "a rank that waits in a ring must not hold back another's parameters",
            lambda a: not a.align_param_gather),
    _refuse("--logits-save-dir", _REMOVE),
    _refuse("--logits-load-dir", _REMOVE),
    _refuse("--use-checkpoint-args", "give the model's flags on the command line"),
    _refuse("--inprocess-restart", _REMOVE),
    _refuse("--perform-rl-step", _REMOVE),
    _refuse("--vision-pretraining", _REMOVE),
)  # fmt: skip


def refuse_conflicts(args: argparse.Namespace) -> None:
    """Raise ValueError, naming the flag, for the first setting that cannot run with hybrid data parallelism."""
    for refusal in REFUSALS:
        if refusal.applies(args):
            raise ValueError(f"--hybrid-data-parallel does not work with {refusal.flag}: {refusal.instead}")
