"""Refusals of flags that nothing reads, because the command line lacks the setting that they belong to.

Megatron accepts each of them alone and ignores it. A flag that only changes speed or memory is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from megatron.bytescale.arguments.conditions import Condition, above, chosen, equals, given
from megatron.bytescale.arguments.refusals import NO_MAMBA, Refusal, ignored


def _belong(setting: str, is_on: Condition, flags: Mapping[str, object], instead: str | None = None) -> list[Refusal]:
    """Return a row for each flag that has no effect unless ``is_on`` holds.

    Args:
        setting: flag that the others belong to, as named in messages.
        is_on: condition that the setting is chosen.
        flags: default value of each flag; a flag "--no-x" belongs to an argument "x" that is True by default.
        instead: advice; default: add the setting, or remove the flag.
    """
    return [
        ignored(
            f"{flag} without {setting}",
            is_on,
            instead or f"add {setting}, or remove {flag}",
            ~equals(_name_of(flag), default, None),
        )
        for flag, default in flags.items()
    ]


def _name_of(flag: str) -> str:
    """Return the name of a flag's argument."""
    return _NAMES.get(flag) or flag.removeprefix("--").removeprefix("no-").replace("-", "_")


_NAMES: Final = {
    "--muon-no-split-qkv": "muon_split_qkv",
    "--disable-mamba-mem-eff-path": "use_mamba_mem_eff_path",
    "--torch-fsdp2-no-reshard-after-forward": "torch_fsdp2_reshard_after_forward",
    "--cuda-graph-scope": "cuda_graph_scope_deprecated",
}
"""Arguments whose names differ from their flags."""

_IS_PLAIN_OPTIMIZER: Final = equals("optimizer", "adam", "sgd", None)
_IS_16_BIT: Final = given("fp16") | given("bf16")
_IS_8_OR_4_BIT: Final = given("fp8") | given("fp4")
_WARMS_UP: Final = given("lr_warmup_iters") | given("lr_warmup_samples") | given("lr_warmup_fraction")
_IS_GATED: Final = given("swiglu") | given("quick_geglu")
_BIASES_EXPERTS: Final = given("moe_router_enable_expert_bias")


def _is_tokenizer(*kinds: str) -> Condition:
    return equals("tokenizer_type", *kinds)


UNUSED_REFUSALS: Final[tuple[Refusal, ...]] = (
    *_belong("--group-query-attention", given("group_query_attention"), {"--num-query-groups": 1}),
    *_belong("--swiglu", _IS_GATED, {"--glu-linear-offset": 0.0, "--activation-func-clamp-value": None}),
    *_belong("--qk-layernorm", given("qk_layernorm"), {"--apply-wd-to-qk-layernorm": False}),
    *_belong("--qk-clip", given("qk_clip"), {"--qk-clip-alpha": 0.5, "--qk-clip-threshold": 100}),
    *_belong(
        "--multi-latent-attention",
        given("multi_latent_attention"),
        {"--q-lora-rank": None, "--kv-lora-rank": 32, "--qk-head-dim": 128, "--qk-pos-emb-head-dim": 64,
         "--v-head-dim": 128},
    ),
    *_belong(
        "--experimental-attention-variant",
        given("experimental_attention_variant"),
        {"--dsa-indexer-n-heads": None, "--dsa-indexer-head-dim": None, "--dsa-indexer-topk": None,
         "--dsa-indexer-topk-freq": 1, "--dsa-indexer-skip-topk-offset": 0, "--dsa-indexer-loss-coeff": None,
         "--dsa-indexer-use-sparse-loss": False, "--dsa-kernel-backend": "none",
         "--dsa-indexer-rope-interleaved": False, "--no-dsa-indexer-rotate-activation": True,
         "--no-dsa-indexer-scoring-relu": True, "--dsa-indexer-k-norm-epsilon": None,
         "--dsa-indexer-k-norm-fp32": False, "--linear-attention-freq": None, "--linear-conv-kernel-dim": 4,
         "--linear-key-head-dim": 128, "--linear-value-head-dim": 128, "--linear-num-key-heads": 16,
         "--linear-num-value-heads": 32},
    ),
    *_belong(
        "--hybrid-layer-pattern",
        given("hybrid_layer_pattern"),
        {"--is-hybrid-model": False, "--mamba-state-dim": 128, "--mamba-head-dim": 64, "--mamba-num-groups": 8,
         "--mamba-num-heads": None, "--disable-mamba-mem-eff-path": True, "--mamba-training-ssm-states-dtype": None,
         "--mtp-hybrid-override-pattern": None},
        NO_MAMBA,
    ),
    *_belong("--position-embedding-type mrope", equals("position_embedding_type", "mrope"), {"--mrope-section": None}),
    *_belong(
        "--use-mup",
        given("use_mup"),
        {"--mup-width-mult": 1.0, "--mup-base-hidden-size": None, "--mup-embedding-mult": 1.0, "--mup-output-mult": 1.0,
         "--mup-base-head-dim": None, "--mup-attn-scale-power": 1.0},
    ),
    *_belong(
        "--num-experts",
        given("num_experts"),
        {"--expert-model-parallel-size": 1, "--expert-tensor-parallel-size": 1, "--moe-ffn-hidden-size": None,
         "--moe-layer-freq": 1, "--moe-router-topk": 2, "--moe-router-num-groups": None,
         "--moe-router-group-topk": None, "--moe-router-pre-softmax": False, "--moe-router-topk-scaling-factor": None,
         "--moe-router-score-function": "softmax", "--moe-router-dtype": None, "--moe-router-enable-expert-bias": False,
         "--moe-router-bias-update-rate": 0.001, "--moe-router-quantile-balancing-ema": 0.0,
         "--moe-router-force-load-balancing": False, "--moe-router-force-biased": None,
         "--moe-router-load-balancing-type": "aux_loss", "--moe-aux-loss-coeff": 0.0, "--moe-z-loss-coeff": None,
         "--moe-input-jitter-eps": None, "--moe-shared-expert-intermediate-size": None,
         "--moe-shared-expert-gate": False, "--moe-expert-capacity-factor": None,
         "--moe-pad-expert-input-to-capacity": False, "--moe-token-drop-policy": "probs",
         "--moe-apply-probs-on-input": False, "--moe-latent-size": None, "--moe-per-layer-logging": False},
    ),
    *_belong("--moe-router-enable-expert-bias", _BIASES_EXPERTS, {"--moe-router-bias-update-rate": 0.001}),
    *_belong(
        "--moe-router-group-topk", given("moe_router_group_topk"), {"--moe-router-num-groups": None}
    ),
    *_belong(
        "--moe-shared-expert-intermediate-size",
        given("moe_shared_expert_intermediate_size"),
        {"--moe-shared-expert-gate": False, "--moe-shared-expert-overlap": False},
    ),
    *_belong(
        "--moe-expert-capacity-factor", chosen("moe_expert_capacity_factor"), {"--moe-token-drop-policy": "probs"}
    ),
    *_belong(
        "--mtp-num-layers",
        given("mtp_num_layers"),
        {"--mtp-loss-scaling-factor": 0.1, "--mtp-use-repeated-layer": False, "--mtp-detach-heads": False},
    ),
    *_belong(
        "--fp8-format",
        given("fp8"),
        {"--fp8-recipe": "delayed", "--fp8-margin": 0, "--fp8-interval": 1, "--fp8-amax-history-len": 1,
         "--fp8-amax-compute-algo": "most_recent", "--no-fp8-wgrad": True, "--fp8-quantizer-factory": None},
    ),
    *_belong("--fp8-format or --fp4-format", _IS_8_OR_4_BIT, {
        "--first-last-layers-bf16": False, "--moe-router-padding-for-quantization": False,
        "--moe-router-padding-for-fp8": False,
    }),
    *_belong(
        "--first-last-layers-bf16",
        given("first_last_layers_bf16"),
        {"--num-layers-at-start-in-bf16": 1, "--num-layers-at-end-in-bf16": 1},
    ),
    *_belong("--fp4-format", given("fp4"), {"--fp4-recipe": "nvfp4", "--fp4-quantizer-factory": None}),
    *_belong(
        "--fp16",
        given("fp16"),
        {"--initial-loss-scale": 2**32, "--min-loss-scale": 1.0, "--loss-scale-window": 1000, "--hysteresis": 2},
    ),
    *_belong("--fp16 or --bf16", _IS_16_BIT, {"--loss-scale": None}),
    *_belong(
        "--use-precision-aware-optimizer",
        given("use_precision_aware_optimizer"),
        {"--main-grads-dtype": "fp32", "--main-params-dtype": "fp32", "--exp-avg-dtype": "fp32",
         "--exp-avg-sq-dtype": "fp32"},
    ),
    *_belong("--optimizer sgd", equals("optimizer", "sgd"), {"--sgd-momentum": 0.9}),
    *_belong(
        "--optimizer adam",
        ~equals("optimizer", "sgd"),
        {"--adam-beta1": 0.9, "--adam-beta2": 0.999, "--adam-eps": 1e-8},
    ),
    *_belong(
        "--optimizer muon",
        ~_IS_PLAIN_OPTIMIZER,
        {"--muon-momentum": 0.9, "--muon-no-split-qkv": True, "--muon-nesterov": False,
         "--muon-scale-mode": "spectral", "--muon-fp32-matmul-prec": "medium", "--muon-coefficient-type": "quintic",
         "--muon-num-ns-steps": 5, "--muon-tp-mode": "blockwise", "--muon-extra-scale-factor": 1.0,
         "--muon-scalar-optimizer": "adam"},
    ),
    *_belong("--optimizer lion", ~_IS_PLAIN_OPTIMIZER, {"--lion-beta1": 0.95, "--lion-beta2": 0.98}),
    *_belong(
        "--optimizer-cpu-offload",
        given("optimizer_cpu_offload"),
        {"--optimizer-offload-fraction": 1.0, "--use-torch-optimizer-for-cpu-offload": False,
         "--overlap-cpu-optimizer-d2h-h2d": False, "--no-pin-cpu-grads": True, "--no-pin-cpu-params": True},
    ),
    *_belong(
        "--lr-decay-style WSD",
        equals("lr_decay_style", "WSD"),
        {"--lr-wsd-decay-style": "exponential", "--lr-wsd-decay-iters": None, "--lr-wsd-decay-samples": None},
    ),
    *_belong("--lr-warmup-iters", _WARMS_UP, {"--lr-warmup-init": 0.0}),
    *_belong("--decoupled-lr", given("decoupled_lr"), {"--decoupled-min-lr": None}),
    *_belong(
        "--recompute-granularity full",
        equals("recompute_granularity", "full"),
        {"--recompute-method": None, "--recompute-num-layers": None},
    ),
    *_belong(
        "--recompute-granularity selective",
        equals("recompute_granularity", "selective") | given("recompute_activations"),
        {"--recompute-modules": None},
    ),
    *_belong(
        "--fine-grained-activation-offloading",
        given("fine_grained_activation_offloading"),
        {"--offload-modules": [], "--min-offloaded-tensor-size": 1 << 20, "--delay-offload-until-cuda-graph": False,
         "--delta-offload-bytes-across-pp-ranks": 0, "--activation-offload-fraction": 1.0,
         "--fine-grained-offloading-max-inflight-offloads": None},
    ),
    *_belong(
        "--moe-paged-stash",
        given("moe_paged_stash"),
        {"--moe-paged-stash-page-size": 64, "--moe-paged-stash-buffer-size-factor-cuda": 1.1,
         "--moe-paged-stash-buffer-size-factor-cpu": 0.0},
    ),
    *_belong(
        "--cpu-offloading-num-layers",
        given("cpu_offloading_num_layers"),
        {"--cpu-offloading-retain-pinned-cpu-buffers": False},
    ),
    *_belong(
        "--use-megatron-fsdp",
        given("use_megatron_fsdp"),
        {"--data-parallel-sharding-strategy": "optim_grads_params", "--outer-dp-sharding-strategy": "no_shard",
         "--fsdp-double-buffer": False, "--megatron-fsdp-main-params-dtype": "fp32",
         "--megatron-fsdp-main-grads-dtype": "auto", "--megatron-fsdp-grad-comm-dtype": "auto",
         "--megatron-fsdp-enable-fine-grained-param-gather": False, "--megatron-fsdp-max-pool-double-buffer": False,
         "--fsdp-db-use-persist-buf-on-alloc-fail": False, "--suggested-communication-unit-size": None,
         "--keep-fp8-transpose-cache": False, "--enable-full-sharding-in-hsdp": False},
    ),
    *_belong(
        "--use-torch-fsdp2", given("use_torch_fsdp2"), {"--torch-fsdp2-no-reshard-after-forward": True}
    ),
    *_belong(
        "--pipeline-model-parallel-size 2",
        above("pipeline_model_parallel_size", 1),
        {"--decoder-first-pipeline-num-layers": None, "--decoder-last-pipeline-num-layers": None,
         "--account-for-embedding-in-pipeline-split": False, "--account-for-loss-in-pipeline-split": False,
         "--num-layers-per-virtual-pipeline-stage": None},
    ),
    *_belong(
        "--fim-data",
        given("fim_data"),
        {"--fim-rate": 0.5, "--fim-spm-rate": 0.5, "--fim-split-sample": None, "--fim-fragment-rate": None,
         "--fim-no-prefix": None, "--fim-prefix-token": "<fim_prefix>", "--fim-middle-token": "<fim_middle>",
         "--fim-suffix-token": "<fim_suffix>", "--fim-pad-token": "<fim_pad>", "--fim-eod-token": "<|endoftext|>"},
    ),
    *_belong(
        "--logits-save-dir",
        given("logits_save_dir"),
        {"--logits-save-top-k": None, "--logits-save-top-p": None, "--logits-save-top-p-min-k": 1,
         "--logits-save-dtype": "fp16"},
    ),
    *_belong(
        "--logits-load-dir",
        given("logits_load_dir"),
        {"--logits-load-decode-threads": 4, "--logits-load-prefetch-factor": 3, "--logits-load-msc-prefetch-depth": 2,
         "--logits-load-kd-loss-alpha": 1.0, "--logits-load-ignore-errors": False},
        "remove it: only Megatron's own pretrain_gpt.py has it",
    ),
    *_belong(
        "--fault-injector-ranks or --fault-injector-num-ranks",
        chosen("fault_injector_ranks") | chosen("fault_injector_num_ranks"),
        {"--fault-injector-fault-types": None, "--fault-injector-fault-probabilities": None,
         "--fault-injector-fault-delay": None, "--fault-injector-delay-start-iteration": None,
         "--fault-injector-mtti-seconds": None, "--fault-injector-offset-seconds": None, "--fault-injector-seed": None},
    ),
    *_belong("--ckpt-convert-save", given("ckpt_convert_save"), {"--ckpt-convert-format": None}),
    *_belong(
        "--ckpt-convert-format",
        given("ckpt_convert_format"),
        {"--ckpt-convert-save": None, "--ckpt-convert-update-legacy-dist-opt-format": False},
    ),
    *_belong(
        "--use-distributed-optimizer", given("use_distributed_optimizer"), {"--use-precision-aware-optimizer": False}
    ),
    *_belong("--fp8-param-gather", given("fp8_param_gather"), {"--reuse-grad-buf-for-mxfp8-param-ag": False}),
    *_belong(
        "--cuda-graph-impl",
        ~equals("cuda_graph_impl", "none", None) | given("enable_cuda_graph") | given("external_cuda_graph"),
        {"--cuda-graph-scope": None, "--cuda-graph-modules": [], "--cuda-graph-warmup-steps": 3},
    ),
    *_belong("--moe-use-upcycling", given("moe_use_upcycling"), {"--moe-upcycling-granularity": 1}),
    *_belong("--replication", given("replication"), {"--replication-jump": None, "--replication-factor": 2}),
    *_belong("--dataloader-type cyclic", equals("dataloader_type", "cyclic"), {"--no-data-sharding": True}),
    *_belong(
        "--log-straggler",
        given("log_straggler"),
        {"--straggler-ctrlr-port": 65535, "--straggler-minmax-count": 1, "--disable-straggler-on-startup": False},
        "use --hybrid-data-parallel, whose log names slow ranks",
    ),
    *_belong("--profile or --use-pytorch-profiler", given("profile") | given("use_pytorch_profiler"),
             {"--profile-step-start": 10, "--profile-step-end": 12, "--profile-ranks": []}),
    *_belong(
        "--use-pytorch-profiler",
        given("use_pytorch_profiler"),
        {"--pytorch-profiler-collect-shapes": False, "--pytorch-profiler-collect-callstack": False,
         "--pytorch-profiler-collect-chakra": False},
    ),
    *_belong(
        "--record-memory-history", given("record_memory_history"), {"--memory-snapshot-path": "snapshot.pickle"}
    ),
    *_belong(
        "--moe-routing-trace-path",
        given("moe_routing_trace_path"),
        {"--moe-routing-trace-max-training-iters": None, "--moe-routing-trace-capture-logits": False,
         "--moe-routing-trace-capture-hidden-states": False, "--moe-routing-trace-dump-weights": False},
    ),
    *_belong(
        "--wandb-project",
        given("wandb_project"),
        {"--wandb-exp-name": None, "--wandb-save-dir": None, "--wandb-entity": None},
    ),
    *_belong("--enable-ft-package", given("enable_ft_package"), {"--calc-ft-timeouts": False}),
    *_belong("--adlr-autoresume", given("adlr_autoresume"), {"--adlr-autoresume-interval": 1000}),
    *_belong(
        "--tokenizer-type TikTokenizer",
        _is_tokenizer("TikTokenizer"),
        {"--tiktoken-pattern": None, "--tiktoken-num-special-tokens": 1000},
    ),
    *_belong(
        "--tokenizer-type NullTokenizer",
        _is_tokenizer("NullTokenizer", "NullMultimodalTokenizer"),
        {"--null-tokenizer-eod-id": None, "--null-tokenizer-pad-id": -1},
    ),
    *_belong(
        "--tokenizer-type SFTTokenizer",
        _is_tokenizer("SFTTokenizer"),
        {"--sft-tokenizer-prompt-format": "nemotron-h-aligned"},
    ),
)  # fmt: skip
"""Rows of every run."""
