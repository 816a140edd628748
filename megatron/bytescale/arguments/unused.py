"""Refusals of flags that nothing reads, because the command line lacks the setting that they belong to.

Megatron accepts each of them alone and ignores it. A flag that only changes speed or memory is not listed.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from typing import Final

from megatron.bytescale.arguments.conditions import Condition, above, chosen, equals, given
from megatron.bytescale.arguments.refusals import NO_MAMBA, Refusal, ignored


def _belong(setting: str, is_on: Condition, flags: Sequence[str], instead: str | None = None) -> list[Refusal]:
    """Return a row for each flag that has no effect unless ``is_on`` holds.

    Args:
        setting: flag that the others belong to, as named in messages.
        is_on: condition that the setting is chosen.
        flags: the others, in the order of the rows.
        instead: advice; default: add the setting, or remove the flag.
    """
    return [
        ignored(f"{flag} without {setting}", is_on, instead or f"add {setting}, or remove {flag}", _changed(flag))
        for flag in flags
    ]


def _changed(flag: str) -> Condition:
    """Return the condition that the argument of one of Megatron's flags has another value than its default."""

    def holds(args: argparse.Namespace) -> bool:
        action = _actions_of_megatron().get(flag)  # None if the installed version has no such flag
        return action is not None and getattr(args, action.dest, None) not in (action.default, _NEUTRAL.get(flag), None)

    return Condition(holds)


_NEUTRAL: Final = {"--expert-tensor-parallel-size": 1}
"""Values, besides the default, that change nothing without the setting."""


@functools.cache
def _actions_of_megatron() -> dict[str, argparse.Action]:
    """Return Megatron's flags, in the installed version."""
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    return {option: action for action in parser._actions for option in action.option_strings}


_IS_PLAIN_OPTIMIZER: Final = equals("optimizer", "adam", "sgd", None)
_IS_16_BIT: Final = given("fp16") | given("bf16")
_IS_8_OR_4_BIT: Final = given("fp8") | given("fp4")
_WARMS_UP: Final = given("lr_warmup_iters") | given("lr_warmup_samples") | given("lr_warmup_fraction")
_IS_GATED: Final = given("swiglu") | given("quick_geglu")
_BIASES_EXPERTS: Final = given("moe_router_enable_expert_bias")


def _is_tokenizer(*kinds: str) -> Condition:
    return equals("tokenizer_type", *kinds)


UNUSED_REFUSALS: Final[tuple[Refusal, ...]] = (
    *_belong("--group-query-attention", given("group_query_attention"), ["--num-query-groups"]),
    *_belong("--swiglu", _IS_GATED, ["--glu-linear-offset", "--activation-func-clamp-value"]),
    *_belong("--qk-layernorm", given("qk_layernorm"), ["--apply-wd-to-qk-layernorm"]),
    *_belong("--batch-invariant-mode", given("batch_invariant_mode"), ["--batch-invariant-backend"]),
    *_belong("--qk-clip", given("qk_clip"), ["--qk-clip-alpha", "--qk-clip-threshold"]),
    *_belong(
        "--multi-latent-attention",
        given("multi_latent_attention"),
        ["--q-lora-rank", "--kv-lora-rank", "--qk-head-dim", "--qk-pos-emb-head-dim",
         "--v-head-dim"],
    ),
    *_belong(
        "--experimental-attention-variant",
        given("experimental_attention_variant"),
        ["--dsa-indexer-n-heads", "--dsa-indexer-head-dim", "--dsa-indexer-topk",
         "--dsa-indexer-topk-freq", "--dsa-indexer-skip-topk-offset", "--dsa-indexer-loss-coeff",
         "--dsa-indexer-use-sparse-loss", "--dsa-kernel-backend",
         "--dsa-indexer-rope-interleaved", "--no-dsa-indexer-rotate-activation",
         "--no-dsa-indexer-scoring-relu", "--dsa-indexer-k-norm-epsilon",
         "--dsa-indexer-k-norm-fp32", "--linear-attention-freq", "--linear-conv-kernel-dim",
         "--linear-key-head-dim", "--linear-value-head-dim", "--linear-num-key-heads",
         "--linear-num-value-heads"],
    ),
    *_belong(
        "--hybrid-layer-pattern",
        given("hybrid_layer_pattern"),
        ["--is-hybrid-model", "--mamba-state-dim", "--mamba-head-dim", "--mamba-num-groups",
         "--mamba-num-heads", "--disable-mamba-mem-eff-path", "--mamba-training-ssm-states-dtype",
         "--mtp-hybrid-override-pattern", "--gdp-num-householder", "--gdp-num-chunk-states-to-recompute",
         "--gdp-cutedsl-kernel"],
        NO_MAMBA,
    ),
    *_belong(
        "--enable-mhc-connections",
        given("enable_mhc_connections"),
        ["--mhc-num-residual-streams", "--mhc-sinkhorn-iterations", "--mhc-init-gating-factor",
         "--mhc-recompute-layer-num"],
    ),
    *_belong("--position-embedding-type mrope", equals("position_embedding_type", "mrope"), ["--mrope-section"]),
    *_belong(
        "--use-mup",
        given("use_mup"),
        ["--mup-width-mult", "--mup-base-hidden-size", "--mup-embedding-mult", "--mup-output-mult",
         "--mup-base-head-dim", "--mup-attn-scale-power"],
    ),
    *_belong(
        "--num-experts",
        given("num_experts"),
        ["--expert-model-parallel-size", "--expert-tensor-parallel-size", "--moe-ffn-hidden-size",
         "--moe-layer-freq", "--moe-router-topk", "--moe-router-num-groups",
         "--moe-router-group-topk", "--moe-router-pre-softmax", "--moe-router-topk-scaling-factor",
         "--moe-router-score-function", "--moe-router-dtype", "--moe-router-enable-expert-bias",
         "--moe-router-bias-update-rate", "--moe-router-quantile-balancing-ema",
         "--moe-router-force-load-balancing", "--moe-router-force-biased",
         "--moe-router-load-balancing-type", "--moe-aux-loss-coeff", "--moe-z-loss-coeff",
         "--moe-input-jitter-eps", "--moe-shared-expert-intermediate-size",
         "--moe-shared-expert-gate", "--moe-expert-capacity-factor",
         "--moe-pad-expert-input-to-capacity", "--moe-token-drop-policy",
         "--moe-apply-probs-on-input", "--moe-latent-size", "--moe-per-layer-logging"],
    ),
    *_belong("--moe-router-enable-expert-bias", _BIASES_EXPERTS, ["--moe-router-bias-update-rate"]),
    *_belong(
        "--moe-router-group-topk", given("moe_router_group_topk"), ["--moe-router-num-groups"]
    ),
    *_belong(
        "--moe-shared-expert-intermediate-size",
        given("moe_shared_expert_intermediate_size"),
        ["--moe-shared-expert-gate", "--moe-shared-expert-overlap"],
    ),
    *_belong(
        "--moe-expert-capacity-factor", chosen("moe_expert_capacity_factor"), ["--moe-token-drop-policy"]
    ),
    *_belong(
        "--mtp-num-layers",
        given("mtp_num_layers"),
        ["--mtp-loss-scaling-factor", "--mtp-use-repeated-layer", "--mtp-detach-heads"],
    ),
    *_belong("--mtp-num-layers 2", above("mtp_num_layers", 1), ["--mtp-hsm"]),
    *_belong(
        "--fp8-format",
        given("fp8"),
        ["--fp8-recipe", "--fp8-margin", "--fp8-interval", "--fp8-amax-history-len",
         "--fp8-amax-compute-algo", "--no-fp8-wgrad", "--fp8-quantizer-factory"],
    ),
    *_belong("--fp8-format or --fp4-format", _IS_8_OR_4_BIT, [
        "--first-last-layers-bf16", "--moe-router-padding-for-quantization",
        "--moe-router-padding-for-fp8",
    ]),
    *_belong(
        "--first-last-layers-bf16",
        given("first_last_layers_bf16"),
        ["--num-layers-at-start-in-bf16", "--num-layers-at-end-in-bf16"],
    ),
    *_belong("--fp4-format", given("fp4"), ["--fp4-recipe", "--fp4-quantizer-factory"]),
    *_belong(
        "--fp16",
        given("fp16"),
        ["--initial-loss-scale", "--min-loss-scale", "--loss-scale-window", "--hysteresis"],
    ),
    *_belong("--fp16 or --bf16", _IS_16_BIT, ["--loss-scale"]),
    *_belong(
        "--use-precision-aware-optimizer",
        given("use_precision_aware_optimizer"),
        ["--main-grads-dtype", "--main-params-dtype", "--exp-avg-dtype",
         "--exp-avg-sq-dtype"],
    ),
    *_belong("--optimizer sgd", equals("optimizer", "sgd"), ["--sgd-momentum"]),
    *_belong(
        "--optimizer adam",
        ~equals("optimizer", "sgd"),
        ["--adam-beta1", "--adam-beta2", "--adam-eps"],
    ),
    *_belong(
        "--optimizer muon",
        ~_IS_PLAIN_OPTIMIZER,
        ["--muon-momentum", "--muon-no-split-qkv", "--muon-nesterov",
         "--muon-scale-mode", "--muon-fp32-matmul-prec", "--muon-coefficient-type",
         "--muon-num-ns-steps", "--muon-tp-mode", "--muon-extra-scale-factor",
         "--muon-scalar-optimizer", "--muon-use-syrk"],
    ),
    *_belong("--optimizer lion", ~_IS_PLAIN_OPTIMIZER, ["--lion-beta1", "--lion-beta2"]),
    *_belong(
        "--optimizer-cpu-offload",
        given("optimizer_cpu_offload"),
        ["--optimizer-offload-fraction", "--use-torch-optimizer-for-cpu-offload",
         "--overlap-cpu-optimizer-d2h-h2d", "--no-pin-cpu-grads", "--no-pin-cpu-params"],
    ),
    *_belong(
        "--lr-decay-style WSD",
        equals("lr_decay_style", "WSD"),
        ["--lr-wsd-decay-style", "--lr-wsd-decay-iters", "--lr-wsd-decay-samples"],
    ),
    *_belong("--lr-warmup-iters", _WARMS_UP, ["--lr-warmup-init"]),
    *_belong("--decoupled-lr", given("decoupled_lr"), ["--decoupled-min-lr"]),
    *_belong(
        "--recompute-granularity full",
        equals("recompute_granularity", "full"),
        ["--recompute-method", "--recompute-num-layers"],
    ),
    *_belong(
        "--recompute-granularity selective",
        equals("recompute_granularity", "selective") | given("recompute_activations"),
        ["--recompute-modules"],
    ),
    *_belong(
        "--fine-grained-activation-offloading",
        given("fine_grained_activation_offloading"),
        ["--offload-modules", "--min-offloaded-tensor-size", "--delay-offload-until-cuda-graph",
         "--delta-offload-bytes-across-pp-ranks", "--activation-offload-fraction",
         "--fine-grained-offloading-max-inflight-offloads"],
    ),
    *_belong(
        "--moe-paged-stash",
        given("moe_paged_stash"),
        ["--moe-paged-stash-page-size", "--moe-paged-stash-buffer-size-factor-cuda",
         "--moe-paged-stash-buffer-size-factor-cpu"],
    ),
    *_belong(
        "--cpu-offloading-num-layers",
        given("cpu_offloading_num_layers"),
        ["--cpu-offloading-retain-pinned-cpu-buffers"],
    ),
    *_belong(
        "--use-megatron-fsdp",
        given("use_megatron_fsdp"),
        ["--data-parallel-sharding-strategy", "--outer-dp-sharding-strategy",
         "--fsdp-double-buffer", "--fsdp-manual-registration", "--megatron-fsdp-main-params-dtype",
         "--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-grad-comm-dtype",
         "--megatron-fsdp-enable-fine-grained-param-gather", "--megatron-fsdp-max-pool-double-buffer",
         "--fsdp-db-use-persist-buf-on-alloc-fail", "--suggested-communication-unit-size",
         "--keep-fp8-transpose-cache", "--enable-full-sharding-in-hsdp", "--megatron-fsdp-version"],
    ),
    *_belong(
        "--use-torch-fsdp2", given("use_torch_fsdp2"), ["--torch-fsdp2-no-reshard-after-forward"]
    ),
    *_belong(
        "--pipeline-model-parallel-size 2",
        above("pipeline_model_parallel_size", 1),
        ["--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
         "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
         "--num-layers-per-virtual-pipeline-stage"],
    ),
    *_belong(
        "--fim-data",
        given("fim_data"),
        ["--fim-rate", "--fim-spm-rate", "--fim-split-sample", "--fim-fragment-rate",
         "--fim-no-prefix", "--fim-prefix-token", "--fim-middle-token",
         "--fim-suffix-token", "--fim-pad-token", "--fim-eod-token"],
    ),
    *_belong(
        "--logits-save-dir",
        given("logits_save_dir"),
        ["--logits-save-top-k", "--logits-save-top-p", "--logits-save-top-p-min-k",
         "--logits-save-dtype"],
    ),
    *_belong(
        "--logits-load-dir",
        given("logits_load_dir"),
        ["--logits-load-decode-threads", "--logits-load-prefetch-factor", "--logits-load-msc-prefetch-depth",
         "--logits-load-kd-loss-alpha", "--logits-load-ignore-errors"],
        "remove it: only Megatron's own pretrain_gpt.py has it",
    ),
    *_belong(
        "--fault-injector-ranks or --fault-injector-num-ranks",
        chosen("fault_injector_ranks") | chosen("fault_injector_num_ranks"),
        ["--fault-injector-fault-types", "--fault-injector-fault-probabilities",
         "--fault-injector-fault-delay", "--fault-injector-delay-start-iteration",
         "--fault-injector-mtti-seconds", "--fault-injector-offset-seconds", "--fault-injector-seed"],
    ),
    *_belong("--ckpt-convert-save", given("ckpt_convert_save"), ["--ckpt-convert-format"]),
    *_belong(
        "--ckpt-convert-format",
        given("ckpt_convert_format"),
        ["--ckpt-convert-save", "--ckpt-convert-update-legacy-dist-opt-format"],
    ),
    *_belong(
        "--use-distributed-optimizer", given("use_distributed_optimizer"), ["--use-precision-aware-optimizer"]
    ),
    *_belong("--fp8-param-gather", given("fp8_param_gather"), ["--reuse-grad-buf-for-mxfp8-param-ag"]),
    *_belong(
        "--cuda-graph-impl",
        ~equals("cuda_graph_impl", "none", None) | given("enable_cuda_graph") | given("external_cuda_graph"),
        ["--cuda-graph-scope", "--cuda-graph-modules", "--cuda-graph-warmup-steps"],
    ),
    *_belong("--moe-use-upcycling", given("moe_use_upcycling"), ["--moe-upcycling-granularity"]),
    *_belong(
        "--tensor-parallel-num-weight-shards",
        above("tensor_parallel_num_weight_shards", 1) | above("expert_tensor_parallel_num_weight_shards", 1),
        ["--gtp-remat-nccl-ub", "--gtp-expert-remat-nccl-ub", "--gtp-remat-opt-in-modules",
         "--gtp-remat-reduce-scatter-with-fp32-accumulation"],
        "remove it: only tensor parallelism divides weights",
    ),
    *_belong(
        "--ckpt-pg-tensors-cache-path",
        given("ckpt_pg_tensors_cache_path"),
        ["--ckpt-pg-tensors-cache-create"],
        "remove it: Megatron runs the pickles in the folder of that cache",
    ),
    *_belong("--otel-enabled", given("otel_enabled"), ["--otel-service-name", "--otel-span-groups"]),
    *_belong("--replication", given("replication"), ["--replication-jump", "--replication-factor"]),
    *_belong("--dataloader-type cyclic", equals("dataloader_type", "cyclic"), ["--no-data-sharding"]),
    *_belong(
        "--log-straggler",
        given("log_straggler"),
        ["--straggler-ctrlr-port", "--straggler-minmax-count", "--disable-straggler-on-startup"],
        "use --hybrid-data-parallel, whose log names slow ranks",
    ),
    *_belong("--profile or --use-pytorch-profiler", given("profile") | given("use_pytorch_profiler"),
             ["--profile-step-start", "--profile-step-end", "--profile-ranks"]),
    *_belong(
        "--use-pytorch-profiler",
        given("use_pytorch_profiler"),
        ["--pytorch-profiler-collect-shapes", "--pytorch-profiler-collect-callstack",
         "--pytorch-profiler-collect-chakra"],
    ),
    *_belong(
        "--record-memory-history", given("record_memory_history"), ["--memory-snapshot-path"]
    ),
    *_belong(
        "--moe-routing-trace-path",
        given("moe_routing_trace_path"),
        ["--moe-routing-trace-max-training-iters", "--moe-routing-trace-capture-logits",
         "--moe-routing-trace-capture-hidden-states", "--moe-routing-trace-dump-weights"],
    ),
    *_belong(
        "--wandb-project",
        given("wandb_project"),
        ["--wandb-exp-name", "--wandb-save-dir", "--wandb-entity"],
    ),
    *_belong("--enable-ft-package", given("enable_ft_package"), ["--calc-ft-timeouts"]),
    *_belong("--adlr-autoresume", given("adlr_autoresume"), ["--adlr-autoresume-interval"]),
    *_belong(
        "--tokenizer-type TikTokenizer",
        _is_tokenizer("TikTokenizer"),
        ["--tiktoken-pattern", "--tiktoken-num-special-tokens"],
    ),
    *_belong(
        "--tokenizer-type NullTokenizer",
        _is_tokenizer("NullTokenizer", "NullMultimodalTokenizer"),
        ["--null-tokenizer-eod-id", "--null-tokenizer-pad-id"],
    ),
    *_belong(
        "--tokenizer-type SFTTokenizer",
        _is_tokenizer("SFTTokenizer"),
        ["--sft-tokenizer-prompt-format"],
    ),
)  # fmt: skip
"""Rows of every run."""
