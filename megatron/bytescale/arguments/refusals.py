"""Settings of Megatron that features do not run with: one table, with a column that says which features refuse.

The column ``always`` refuses in every run: what Megatron 0.19.2 drops in silence, or fails on after the start.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from megatron.bytescale.core.transformer.moe.expert_ranks import ranks_that_share_experts


@dataclass(frozen=True)
class Refusal:
    """One setting that some features do not run with.

    Attributes:
        flag: the setting, as messages name it.
        applies: whether parsed arguments have it.
        instead: what the user can do, by the name of each feature that refuses.
    """

    flag: str
    applies: Callable[[argparse.Namespace], bool]
    instead: Mapping[str, str]

    def message(self, feature: str, feature_flag: str) -> str:
        """Return the error of one feature, which ``feature_flag`` switches on."""
        return f"{feature_flag} does not work with {self.flag}: {self.instead[feature].format(feature_flag)}"


ALWAYS: Final = "always"
"""The column of rows that refuse in every run, and what stands for a feature's flag in their messages."""

PROGRAM: Final = "bytescale"
REMOVE: Final = "remove it, or train without {}"


def refuse(
    flag: str,
    features: str,
    instead: str = REMOVE,
    applies: Callable[[argparse.Namespace], bool] | None = None,
    **own: str,
) -> Refusal:
    """Return a row of the table.

    Args:
        flag: see ``Refusal``; its words after the first are not part of the flag.
        features: names of the features that refuse it, in one string.
        instead: the advice of all of them; ``{}`` stands for the flag that switches the feature on.
        applies: see ``Refusal``; by default whether the argument of that name has a true value.
        own: advice of single features, where it differs.
    """
    return Refusal(
        flag,
        applies or _is_set(flag.split()[0].lstrip("-").replace("-", "_")),
        {**dict.fromkeys(features.split(), instead), **own},
    )


def refuse_conflicts(args: argparse.Namespace, features: Mapping[str, str], rows: Collection[Refusal]) -> None:
    """Raise ValueError, naming the flag, for the first row that applies to an enabled feature.

    Args:
        args: the result of Megatron's parser, before Megatron checks it.
        features: flag of each enabled feature, by its name.
        rows: the table.
    """
    refusing = {**features, ALWAYS: PROGRAM}
    for row in rows:
        names = [name for name in refusing if name in row.instead]
        if names and row.applies(args):
            raise ValueError(row.message(names[0], refusing[names[0]]))


def _with_global_tokens(name: str) -> Callable[[Any], bool]:
    return lambda args: _is_set("hdp_global_tokens")(args) and _is_set(name)(args)


def _is_set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _above(name: str, limit: float) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 0) > limit


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _is_local(name: str) -> Callable[[Any], bool]:
    """Return whether an argument is set and the layers are Megatron's local ones."""
    return lambda args: bool(getattr(args, name, None)) and args.transformer_impl == "local"


def _looks_elsewhere(args: Any) -> bool:
    """Return whether windows reach ahead of a token, or not back."""
    size = args.window_size
    return bool(size) and (len(size) != 2 or size[0] < 1 or size[1] != 0)


def _as_pattern(frequency: Any) -> int | None:
    """Return for how many layers a pattern is, None for one that repeats; 0 for a number below 1."""
    if isinstance(frequency, list):
        return len(frequency)
    return None if frequency is None or frequency > 0 else 0


def _with_yarn(name: str, default: Any) -> Callable[[Any], bool]:
    return lambda args: args.position_embedding_type == "yarn" and getattr(args, name) != default


def _on_cpu(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None)) and args.distributed_backend == "gloo"


def _cannot_append(path: str | None) -> bool:
    folder = os.path.dirname(os.path.abspath(path)) if path else "."
    return not (os.path.isdir(folder) and os.access(folder, os.W_OK))


def _recomputes_what_policies_recompute(args: Any) -> bool:
    """Return whether Megatron recomputes more than parts of experts, which policies do not touch."""
    if getattr(args, "recompute_activations", False):
        return True
    modules = set(args.recompute_modules or ["core_attn"])
    experts_only = modules <= {"moe", "moe_act", "shared_experts"}
    return args.recompute_granularity == "full" or bool(args.recompute_granularity and not experts_only)


_NO_GRAPH = "remove it: a graph's memory cannot be swapped"
_NOT_STANDARD = "remove it: its layers are not Megatron's TransformerLayer"
_NEW_SHAPES = "remove it: micro-batches differ in shape"
_PLAIN_CAUSAL = "remove it, or use --transformer-impl transformer_engine: policies run local layers with our attention"
_SECOND_SWAP = "choose one: the policy swaps too"
_LOOK_BACK = "give --window-size N,0 with N above 0: each token sees its own key and up to N keys before it"
_NO_SHARDS = "leave it at 1: only tensor parallelism divides weights"
_OTHER_SCRIPT = "remove it: only Megatron's own pretrain_gpt.py has it"
REFUSALS: Final[tuple[Refusal, ...]] = (
    refuse("--context-parallel-size > 1", "", applies=_above("context_parallel_size", 1),
           hdp="leave it at 1: --hybrid-data-parallel gives each document its own width",
           slices="leave it at 1: its zigzag shares hold tokens from both ends of the sequence"),
    refuse("--context-parallel-size > 1 of local layers", "activations", "use --hybrid-data-parallel in its place",
           lambda a: a.transformer_impl == "local" and a.context_parallel_size > 1),
    refuse("--hybrid-context-parallel", "hdp slices always", "use --hybrid-data-parallel in its place",
           hdp="choose one: --hybrid-data-parallel takes its place"),
    refuse("--microbatch-group-size-per-virtual-pipeline-stage", "hdp", "give at least --pipeline-model-parallel-size",
           lambda a: (a.microbatch_group_size_per_vp_stage or 1 << 30) < a.pipeline_model_parallel_size),
    refuse("--defer-embedding-wgrad-compute", "hdp slices loss_chunks",
           hdp="remove it: its buffers need micro-batches of equal size",
           slices="remove it: it assumes that the first forward is also the first backward"),
    refuse("--delay-wgrad-compute", "slices", "remove it: it pairs forward and backward passes in another order"),
    refuse("--overlap-param-gather-with-optimizer-step", "hdp slices", "give --overlap-param-gather alone",
           hdp="give --overlap-param-gather alone: all gathers start with the step"),
    refuse("--num-experts under tensor parallelism", "hdp slices",
           "add --sequence-parallel, which Megatron's experts need there",
           lambda a: a.num_experts and a.tensor_model_parallel_size > 1 and not a.sequence_parallel),
    refuse("--num-experts with biases of local layers without --hybrid-data-parallel", ALWAYS, "add it, or split "
           "experts (--expert-model-parallel-size): autograd forbids how Megatron adds biases", lambda a: _is_local(
           "num_experts")(a) and a.add_bias_linear and a.expert_model_parallel_size < 2 and not a.hybrid_data_parallel),
    refuse("--moe-token-dispatcher-type allgather", "hdp", "use alltoall: data-parallel ranks that share experts have "
           "different numbers of tokens, and allgather needs equal ones",
           lambda a: a.moe_token_dispatcher_type == "allgather" and ranks_that_share_experts(a) > 1),
    refuse("--moe-token-dispatcher-type flex", "hdp slices", "use alltoall",
           lambda a: a.moe_token_dispatcher_type == "flex"),
    refuse("--moe-router-load-balancing-type", "hdp", "use aux_loss or none, and --moe-router-enable-expert-bias if "
           "wanted: the others need statistics of whole documents, or of all ranks, inside a layer",
           lambda a: bool(a.num_experts and set(_as_list(a.moe_router_load_balancing_type)) - {"aux_loss", "none"})),
    refuse("--moe-router-load-balancing-type of slices", "slices", "use aux_loss, seq_aux_loss or none, and "
           "--moe-router-enable-expert-bias if wanted: the others choose experts, or weigh them, by statistics that a "
           "slice does not have",
           lambda a: bool(a.num_experts and set(_as_list(a.moe_router_load_balancing_type))
                          - {"aux_loss", "seq_aux_loss", "none"})),
    refuse("--moe-expert-capacity-factor", "hdp slices", "remove it: which tokens are dropped would depend on the plan",
           lambda a: a.moe_expert_capacity_factor is not None,
           slices="remove it: which tokens are dropped would depend on the slices"),
    refuse("--overlap-moe-expert-parallel-comm", "hdp slices activations always", "remove it: it has its own schedule",
           hdp="remove it: it has its own schedule, without planned steps"),
    refuse("--moe-paged-stash", "hdp slices activations", activations="choose one: it stores activations itself"),
    refuse("--moe-enable-routing-replay", "hdp slices"),
    refuse("--moe-latent-size", "hdp slices"),
    refuse("--cuda-graph-impl", "hdp slices activations", _NEW_SHAPES, lambda a: a.cuda_graph_impl != "none",
           activations=_NO_GRAPH),
    refuse("--enable-cuda-graph", "hdp slices", _NEW_SHAPES, activations=_NO_GRAPH),
    refuse("--external-cuda-graph", "hdp slices", _NEW_SHAPES, activations=_NO_GRAPH),
    refuse("--optimizer-cuda-graph", "hdp"),
    refuse("--use-megatron-fsdp", "hdp slices activations", "use --use-distributed-optimizer",
           hdp="use --use-distributed-optimizer: FSDP needs equal micro-batch counts"),
    refuse("--use-torch-fsdp2", "hdp slices activations", "use --use-distributed-optimizer",
           hdp="use --use-distributed-optimizer: FSDP needs equal micro-batch counts"),
    refuse("--num-distributed-optimizer-instances > 1", "hdp",
           applies=_above("num_distributed_optimizer_instances", 1)),
    refuse("--tensor-parallel-num-weight-shards > 1", ALWAYS, _NO_SHARDS,
           _above("tensor_parallel_num_weight_shards", 1)),
    refuse("--expert-tensor-parallel-num-weight-shards > 1", ALWAYS, _NO_SHARDS,
           _above("expert_tensor_parallel_num_weight_shards", 1)),
    refuse("--tp-comm-overlap", "hdp slices", "remove it: its buffers have one fixed shape"),
    refuse("--multi-latent-attention", "activations", _NOT_STANDARD),
    refuse("--multi-latent-attention without --hybrid-data-parallel", "slices", "add --hybrid-data-parallel: its RoPE "
           "is inside attention, which does not know the positions of slices of samples",
           lambda a: a.multi_latent_attention and not a.hybrid_data_parallel),
    refuse("--multi-latent-attention of local layers without --hybrid-data-parallel", ALWAYS, "add "
           "--hybrid-data-parallel, or use --transformer-impl transformer_engine: Megatron's local attention has one "
           "head size", lambda a: _is_local("multi_latent_attention")(a) and not a.hybrid_data_parallel),
    refuse("--multi-latent-attention with --position-embedding-type", "hdp", "use rope or none there, and --rope-type "
           "yarn for YaRN", lambda a: a.multi_latent_attention and a.position_embedding_type == "yarn"),
    refuse("--mla-down-proj-fusion", "hdp", "remove it: its module computes positions by rows"),
    refuse("--mtp-num-layers", "activations", "remove it: policies do not plan its layers"),
    refuse("--mtp-num-layers without --hybrid-data-parallel", "slices loss_chunks",
           "add --hybrid-data-parallel, whose loader knows the tokens of the next slice",
           lambda a: a.mtp_num_layers and not a.hybrid_data_parallel,
           loss_chunks="add --hybrid-data-parallel, which computes its losses in chunks too"),
    refuse("--mtp-num-layers in pipelines", ALWAYS, "add --hybrid-data-parallel: without it stages would get no tokens",
           lambda a: a.mtp_num_layers and a.pipeline_model_parallel_size > 1 and not a.hybrid_data_parallel),
    refuse("--experimental-attention-variant", "hdp slices", activations=_NOT_STANDARD),
    refuse("--hybrid-layer-pattern", ALWAYS, "remove it: models are GPTs, without Mamba layers"),
    refuse("--hybrid-override-pattern", ALWAYS, "remove it: models are GPTs, without Mamba layers"),
    refuse("--heterogeneous-layers-config-path", "hdp slices", activations=_NOT_STANDARD),
    refuse("--heterogeneous-layers-config-encoded-json", "hdp slices", activations=_NOT_STANDARD),
    refuse("--spec", "hdp slices", "remove it: {} has its own layer spec", activations=_NOT_STANDARD),
    refuse("--transformer-impl inference_optimized", "hdp slices", "use local or transformer_engine",
           lambda a: a.transformer_impl == "inference_optimized"),
    refuse("--apply-layernorm-1p of local layers", ALWAYS, "remove it: it needs TransformerEngine",
           _is_local("layernorm_zero_centered_gamma")),
    refuse("--qk-l2-norm without experts", ALWAYS, "Megatron's local layers leave the norm out: use "
           "--transformer-impl transformer_engine, or --qk-layernorm",
           lambda a: a.qk_l2_norm and not a.num_experts and a.transformer_impl == "local"),
    *(refuse(f"{flag} of local layers", "activations", _PLAIN_CAUSAL, _is_local(flag[2:].replace("-", "_")))
      for flag in ("--apply-query-key-layer-scaling", "--reset-attention-mask")),
    refuse("--window-size other than N,0 of local layers", "activations", _LOOK_BACK,
           lambda a: a.transformer_impl == "local" and _looks_elsewhere(a)),
    refuse("--window-size other than N,0", "hdp slices", _LOOK_BACK, _looks_elsewhere),
    refuse("--window-attn-skip-freq alone", ALWAYS, "add --window-size, or remove it",
           lambda a: a.window_attn_skip_freq and not a.window_size),
    refuse("--window-attn-skip-freq of another length", ALWAYS, "give a number above 0, or one entry for each layer",
           lambda a: a.window_size and _as_pattern(a.window_attn_skip_freq) not in (None, a.num_layers)),
    refuse("--num-query-groups", "hdp slices activations", "make it a divisor of --num-attention-heads",
           lambda a: a.group_query_attention and a.num_attention_heads % (a.num_query_groups or 1)),
    refuse("--attention-backend", "hdp", "choose with --hdp-attention-kernel",
           lambda a: a.attention_backend.name != "auto", slices="remove it: slices use their own kernels"),
    refuse("--use-kitchen-attention", "hdp", "choose with --hdp-attention-kernel",
           slices="remove it: slices use their own kernels"),
    refuse("--max-seqlen-per-dp-cp-rank", "hdp", "give --hdp-tokens-per-rank"),
    refuse("--attention-dropout > 0", "hdp slices", "add --attention-dropout 0 (Megatron's default is 0.1)",
           _above("attention_dropout", 0), activations="give 0: what is recomputed must be what was computed"),
    refuse("--hidden-dropout > 0", "activations", "give 0: what is recomputed must be what was computed",
           _above("hidden_dropout", 0)),
    refuse("--recompute-granularity", "activations",
           "choose one: the policy recomputes too; only the --recompute-modules of experts work with it",
           _recomputes_what_policies_recompute),
    refuse("--mlp-chunks-for-training", "activations", "remove it", _above("mlp_chunks_for_training", 1)),
    refuse("--apply-query-key-layer-scaling", "hdp slices"),
    refuse("--qk-clip", "hdp slices"),
    refuse("--log-max-attention-logit", "hdp slices"),
    refuse("--position-embedding-type", "hdp slices", "use rope, yarn, learned_absolute or none",
           lambda a: a.position_embedding_type not in ("rope", "yarn", "learned_absolute", "none")),
    *(refuse(f"{flag} with --position-embedding-type yarn", ALWAYS, "remove it: Megatron's YaRN does not have it",
             _with_yarn(flag[2:].replace("-", "_"), default))
      for flag, default in (("--rotary-percent", 1.0), ("--rotary-interleaved", False), ("--use-rope-scaling", False),
                            ("--rotary-seq-len-interpolation-factor", None))),
    refuse("--fp8-format without --hybrid-data-parallel", "slices", "add it: its plans pad slices to whole blocks",
           lambda a: a.fp8 and not a.hybrid_data_parallel),
    refuse("--fp8-format", "activations", "use bf16", _is_set("fp8")),
    refuse("--fp8-format of local layers", ALWAYS, "use --transformer-impl transformer_engine, which needs a GPU and "
           "TransformerEngine (pip install .[gpu]); Megatron's local layers would ignore it", _is_local("fp8")),
    refuse("--fp4-format", "hdp slices", "use bf16: FP4 needs aligned token counts", _is_set("fp4"),
           activations="use bf16"),
    refuse("--te-precision-config-file", "hdp slices",
           "remove it: it may choose FP8, which needs aligned token counts"),
    refuse("--fine-grained-activation-offloading", "hdp", activations=_SECOND_SWAP,
           slices="remove it: it restores the oldest activations, not the last slice's"),
    refuse("--cpu-offloading-num-layers", "hdp", activations=_SECOND_SWAP,
           slices="remove it: it restores the oldest activations, not the last slice's"),
    refuse("--rampup-batch-size without --hybrid-data-parallel", ALWAYS,
           "give --step-batch-size-schedule: Megatron 0.19.2 ignores it",
           lambda a: _is_set("rampup_batch_size")(a) and not a.hybrid_data_parallel),
    refuse("--decrease-batch-size-if-needed", "hdp"),
    refuse("--train-samples with --hdp-global-tokens", "hdp", "give --train-iters: steps differ in documents",
           _with_global_tokens("train_samples")),
    refuse("--hdp-loader ray with --hdp-global-tokens", "hdp", "use --hdp-loader local",
           lambda a: a.hdp_loader == "ray" and a.hdp_global_tokens),
    refuse("--rampup-batch-size with --hdp-global-tokens", "hdp", "remove one of them",
           _with_global_tokens("rampup_batch_size")),
    refuse("--step-batch-size-schedule with --hdp-global-tokens", "hdp", "remove one of them",
           _with_global_tokens("step_batch_size_schedule")),
    refuse("--sculpt-windows with --hdp-global-tokens", "hdp", "give --global-batch-size alone: windows have one size",
           _with_global_tokens("sculpt_windows")),
    refuse("--iterations-to-skip", "hdp"),
    refuse("--phase-transition-iterations", "hdp"),
    refuse("--full-validation", "hdp slices", "use --eval-iters"),
    refuse("--full-validation alone", ALWAYS, "add --multiple-validation-sets, which Megatron 0.19.2 needs with it",
           lambda a: a.full_validation and not a.multiple_validation_sets),
    refuse("--multiple-validation-sets", "hdp"),
    refuse("--multiple-validation-sets alone", ALWAYS, "add --full-validation, which Megatron 0.19.2 needs with it",
           lambda a: a.multiple_validation_sets and not a.full_validation),
    refuse("--fim-data", "hdp"),
    refuse("--allow-ambiguous-pad-tokens", "hdp", "remove it: documents hold no padding"),
    refuse("--object-storage-cache-path", "hdp", "copy the data to a file system: lengths come from local .idx files"),
    refuse("--mock-data", "hdp", "build a corpus with `bytescale corpus`"),
    refuse("--per-dataset-sequences-path", "hdp", "remove it: lengths come from the .idx files"),
    refuse("--dataloader-fast-cache-load", "hdp", "remove it: document samples keep no index cache"),
    refuse("--dataloader-defer-npy-index-mmap", "hdp", "remove it: document samples keep no index cache"),
    refuse("--dataloader-inter-document-masking", "slices always",
           "use --hybrid-data-parallel, where documents never attend to each other",
           hdp="remove it: documents never attend to each other here"),
    refuse("--reset-position-ids", "hdp", "remove it: positions always restart with each document here"),
    refuse("--reset-attention-mask", "hdp", "remove it: documents never attend to each other here",
           slices="use --hybrid-data-parallel, where documents never attend to each other"),
    refuse("--eod-mask-loss", "hdp", "remove it: the last token of a document never has a label here"),
    refuse("--dataloader-type cyclic", "hdp", applies=lambda a: a.dataloader_type == "cyclic"),
    refuse("--micro-batch-size > 1", "hdp", "leave it at 1: documents are packed by tokens",
           _above("micro_batch_size", 1)),
    refuse("--eval-micro-batch-size > 1", "hdp", "leave it at 1", _above("eval_micro_batch_size", 1)),
    refuse("--no-align-param-gather", "hdp",
           "remove it: a rank that waits in a ring must not delay another rank's parameters",
           lambda a: not a.align_param_gather),
    refuse("--logits-save-dir", "hdp slices loss_chunks"),
    refuse("--logits-load-dir", ALWAYS, _OTHER_SCRIPT),
    refuse("--use-checkpoint-args", ALWAYS, "give the model's flags on the command line"),
    refuse("--ckpt-step with --use-distributed-optimizer and --ckpt-format torch", ALWAYS,
           "use --ckpt-format torch_dist, or --no-load-optim: Megatron 0.19.2 takes the last checkpoint's optimizer",
           lambda a: _is_set("ckpt_step")(a) and a.ckpt_format == "torch" and a.use_distributed_optimizer
           and not a.no_load_optim),
    refuse("--inprocess-restart", ALWAYS, _OTHER_SCRIPT),
    refuse("--perform-rl-step", ALWAYS, "use Megatron's own train_rl.py"),
    refuse("--vision-pretraining", ALWAYS, "remove it: models are GPTs"),
    refuse("--init-method-xavier-uniform", ALWAYS, "give --init-method-std: Megatron 0.19.2 fails on it"),
    refuse("--freeze-all-layers", ALWAYS, "remove it: nothing would train"),
    refuse("--log-straggler", ALWAYS, "use --hybrid-data-parallel, whose log names slow ranks"),
    refuse("--check-for-spiky-loss", "hdp slices", "remove it: micro-batches differ in size, and so do their losses"),
    refuse("--ddp-average-in-collective", "hdp", "remove it: the loss is divided once, for all tokens of the step"),
    refuse("--ddp-average-in-collective with --calculate-per-token-loss", ALWAYS, "remove one of them",
           lambda a: a.ddp_average_in_collective and a.calculate_per_token_loss),
    refuse("--result-rejected-tracker-filename", "hdp", "remove it: iterations cannot be skipped"),
    refuse("--result-rejected-tracker-filename in a folder that cannot be written", ALWAYS, "choose another folder",
           lambda a: _cannot_append(a.result_rejected_tracker_filename)),
    refuse("--moe-routing-trace-path", "hdp slices", "remove it: it counts micro-batches of one size"),
    refuse("--moe-routing-trace-path on CPU", ALWAYS, "remove it: it needs a GPU", _on_cpu("moe_routing_trace_path")),
    refuse("--optimizer", "hdp", "use adam or sgd", lambda a: a.optimizer not in ("adam", "sgd")),
    refuse("--optimizer of another package", ALWAYS, "install emerging-optimizers, or use adam or sgd",
           lambda a: a.optimizer not in ("adam", "sgd") and not importlib.util.find_spec("emerging_optimizers")),
    refuse("--optimizer-cpu-offload on CPU", ALWAYS, "remove it: it needs a GPU", _on_cpu("optimizer_cpu_offload")),
    refuse("--init-model-with-meta-device without FSDP", ALWAYS,
           "remove it: it needs --use-megatron-fsdp or --use-torch-fsdp2",
           lambda a: a.init_model_with_meta_device and not (a.use_megatron_fsdp or a.use_torch_fsdp2)),
    refuse("--use-sharp", ALWAYS, "remove it: its process groups cannot be made here"),
    refuse("--sharp-enabled-group", ALWAYS, "remove it: its process groups cannot be made here"),
)  # fmt: skip
