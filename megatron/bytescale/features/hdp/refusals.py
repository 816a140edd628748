"""Megatron settings that hybrid data parallelism refuses, some of them also refused by pipelines in slices."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.bytescale.arguments.conditions import NCCLEP, above, chosen, equals, given, where
from megatron.bytescale.arguments.layer_settings import AttentionChoice, Balancing, QueryGroups, Windows
from megatron.bytescale.arguments.refusals import REMOVE, refuse
from megatron.bytescale.core.transformer.moe.expert_ranks import ExpertSizes, ranks_that_share_experts


@dataclass(frozen=True)
class _VirtualGroups:
    """The number of micro-batches that a stage runs through one virtual stage before the next virtual stage."""

    microbatch_group_size_per_vp_stage: int | None
    pipeline_model_parallel_size: int

    def are_small(self) -> bool:
        """Return whether a group is smaller than the pipeline."""
        size = self.microbatch_group_size_per_vp_stage
        return size is not None and 0 < size < self.pipeline_model_parallel_size


_NEW_SHAPES = "remove it: micro-batches differ in shape"
_LOOK_BACK = "give --window-size N,0 with N above 0: each token attends to itself and up to N earlier tokens"
REFUSALS = (
    refuse("--num-experts under tensor parallelism", "hdp slices", "add --sequence-parallel, which Megatron's experts "
           "need then", given("num_experts") & above("tensor_model_parallel_size", 1) & ~given("sequence_parallel")),
    refuse("--moe-flex-dispatcher-backend ncclep", "hdp slices", "use deepep or hybridep: ncclep needs a capacity, and "
           "dropped tokens would depend on the plan", NCCLEP),
    refuse("--moe-paged-stash", "hdp slices"),
    refuse("--moe-enable-routing-replay", "hdp slices"),
    refuse("--cuda-graph-impl", "hdp slices", _NEW_SHAPES, ~equals("cuda_graph_impl", "none")),
    refuse("--enable-cuda-graph", "hdp slices", _NEW_SHAPES),
    refuse("--external-cuda-graph", "hdp slices", _NEW_SHAPES),
    refuse("--tp-comm-overlap", "hdp slices", "remove it: its buffers have one fixed shape"),
    refuse("--experimental-attention-variant", "hdp slices"),
    refuse("--heterogeneous-layers-config-path", "hdp slices"),
    refuse("--heterogeneous-layers-config-encoded-json", "hdp slices"),
    refuse("--enable-mhc-connections", "hdp slices", "remove it: layers have one residual stream here"),
    refuse("--mtp-hsm", "hdp slices", "remove it: the tokens that it mixes would depend on the plan"),
    refuse("--spec", "hdp slices", "train Megatron's GPT without it: {} has its own layer spec"),
    refuse("--transformer-impl inference_optimized", "hdp slices", "use local or transformer_engine",
           equals("transformer_impl", "inference_optimized")),
    refuse("--window-size other than N,0", "hdp slices", _LOOK_BACK, where(Windows, Windows.look_elsewhere)),
    refuse("--num-query-groups", "hdp slices", "make it a divisor of --num-attention-heads",
           given("group_query_attention") & where(QueryGroups, QueryGroups.are_uneven)),
    refuse("--attention-dropout > 0", "hdp slices", "add --attention-dropout 0 (Megatron's default is 0.1)",
           above("attention_dropout", 0)),
    refuse("--apply-query-key-layer-scaling", "hdp slices"),
    refuse("--position-embedding-type", "hdp slices", "use rope, yarn, learned_absolute or none",
           ~equals("position_embedding_type", "rope", "yarn", "learned_absolute", "none")),
    refuse("--fp4-format", "hdp slices", "use bf16: FP4 needs aligned token counts", given("fp4")),
    refuse("--te-precision-config-file", "hdp slices", "remove it: it may choose FP8, which needs aligned token "
           "counts"),
    refuse("--full-validation", "hdp slices", "use --eval-iters"),
    refuse("--logits-save-dir", "hdp slices"),
    refuse("--check-for-spiky-loss", "hdp slices", "remove it: losses vary because micro-batches differ in size"),
    refuse("--moe-routing-trace-path", "hdp slices", "remove it: it counts micro-batches of one size"),
    refuse("--context-parallel-size > 1", "hdp", "leave it at 1: --hybrid-data-parallel gives each document its own "
           "width", above("context_parallel_size", 1)),
    refuse("--hybrid-context-parallel", "hdp", "choose one: --hybrid-data-parallel takes its place"),
    refuse("--microbatch-group-size-per-virtual-pipeline-stage", "hdp", "give at least --pipeline-model-parallel-size",
           where(_VirtualGroups, _VirtualGroups.are_small)),
    refuse("--defer-embedding-wgrad-compute", "hdp", "remove it: its buffers need micro-batches of equal size"),
    refuse("--overlap-param-gather-with-optimizer-step", "hdp", "give --overlap-param-gather alone: all gathers start "
           "with the step"),
    refuse("--moe-token-dispatcher-type allgather", "hdp", "use alltoall: data-parallel ranks that share experts have "
           "different numbers of tokens, and allgather needs equal numbers",
           equals("moe_token_dispatcher_type", "allgather")
           & where(ExpertSizes, lambda sizes: ranks_that_share_experts(sizes) > 1)),
    refuse("--moe-router-load-balancing-type", "hdp", "use aux_loss, seq_aux_loss, global_aux_loss or none, and "
           "--moe-router-enable-expert-bias if wanted: sinkhorn and quantile_balancing choose a token's experts by the "
           "other tokens of its micro-batch, so the choice would depend on the plan",
           given("num_experts") & where(Balancing, lambda balancing: balancing.is_beyond(
               "aux_loss", "seq_aux_loss", "global_aux_loss", "none"))),
    refuse("--moe-expert-capacity-factor", "hdp", "remove it: the dropped tokens would depend on the plan",
           chosen("moe_expert_capacity_factor")),
    refuse("--overlap-moe-expert-parallel-comm", "hdp", "remove it: it runs its own schedule, without planned steps"),
    refuse("--optimizer-cuda-graph", "hdp"),
    refuse("--use-megatron-fsdp", "hdp", "use --use-distributed-optimizer: FSDP needs equal micro-batch counts"),
    refuse("--use-torch-fsdp2", "hdp", "use --use-distributed-optimizer: FSDP needs equal micro-batch counts"),
    refuse("--num-distributed-optimizer-instances > 1", "hdp", REMOVE, above("num_distributed_optimizer_instances", 1)),
    refuse("--multi-latent-attention with --position-embedding-type", "hdp", "use rope or none, and --rope-type "
           "yarn for YaRN", given("multi_latent_attention") & equals("position_embedding_type", "yarn")),
    refuse("--mla-down-proj-fusion", "hdp", "remove it: its module computes positions by rows"),
    refuse("--attention-backend", "hdp", "remove it: --hdp-attention-kernel chooses the kernel",
           where(AttentionChoice, AttentionChoice.is_chosen)),
    refuse("--use-kitchen-attention", "hdp", "choose with --hdp-attention-kernel"),
    refuse("--max-seqlen-per-dp-cp-rank", "hdp", "give --hdp-tokens-per-rank"),
    refuse("--fine-grained-activation-offloading", "hdp"),
    refuse("--cpu-offloading-num-layers", "hdp"),
    refuse("--decrease-batch-size-if-needed", "hdp"),
    refuse("--train-samples with --hdp-global-tokens", "hdp", "give --train-iters: steps differ in documents",
           given("hdp_global_tokens") & given("train_samples")),
    refuse("--hdp-loader ray with --hdp-global-tokens", "hdp", "use --hdp-loader local",
           given("hdp_global_tokens") & equals("hdp_loader", "ray")),
    refuse("--loss-normalization groups without --sft", "hdp", "add --sft: groups are of data sets with weights",
           equals("loss_normalization", "groups") & ~given("sft") & ~given("trains_on_answers")),
    refuse("--loss-normalization documents with --sculpt-windows", "hdp", "remove it: windows hold several documents",
           equals("loss_normalization", "documents") & given("sculpt_windows")),
    refuse("--loss-normalization documents with --draft-heads", "hdp", "use --loss-normalization tokens",
           equals("loss_normalization", "documents") & given("draft_heads")),
    refuse("--hdp-blend-by tokens with --hdp-loader ray", "hdp", "remove it: text has no lengths yet",
           equals("hdp_blend_by", "tokens") & equals("hdp_loader", "ray")),
    refuse("--hdp-blend-by tokens with --sculpt-windows", "hdp", "remove it: windows have one length",
           equals("hdp_blend_by", "tokens") & given("sculpt_windows")),
    refuse("--rampup-batch-size with --hdp-global-tokens", "hdp", "remove one of them",
           given("hdp_global_tokens") & given("rampup_batch_size")),
    refuse("--step-batch-size-schedule with --hdp-global-tokens", "hdp", "remove one of them",
           given("hdp_global_tokens") & given("step_batch_size_schedule")),
    refuse("--sculpt-windows with --hdp-global-tokens", "hdp", "give --global-batch-size alone: windows have one size",
           given("hdp_global_tokens") & given("sculpt_windows")),
    refuse("--iterations-to-skip", "hdp"),
    refuse("--phase-transition-iterations", "hdp"),
    refuse("--multiple-validation-sets", "hdp"),
    refuse("--fim-data", "hdp"),
    refuse("--allow-ambiguous-pad-tokens", "hdp", "remove it: documents contain no padding"),
    refuse("--object-storage-cache-path", "hdp", "copy the data to a file system: lengths come from local .idx files"),
    refuse("--mock-data", "hdp", "build a corpus with `bytescale corpus`"),
    refuse("--per-dataset-sequences-path", "hdp", "remove it: lengths come from the .idx files"),
    refuse("--dataloader-fast-cache-load", "hdp", "remove it: document samples keep no index cache"),
    refuse("--dataloader-defer-npy-index-mmap", "hdp", "remove it: document samples keep no index cache"),
    refuse("--dataloader-inter-document-masking", "hdp", "remove it: documents never attend to each other here"),
    refuse("--reset-position-ids", "hdp", "remove it: positions always restart with each document here"),
    refuse("--reset-attention-mask", "hdp", "remove it: documents never attend to each other here"),
    refuse("--eod-mask-loss", "hdp", "remove it: the last token of a document never has a label here"),
    refuse("--dataloader-type cyclic", "hdp", REMOVE, equals("dataloader_type", "cyclic")),
    refuse("--micro-batch-size > 1", "hdp", "leave it at 1: documents are packed by tokens",
           above("micro_batch_size", 1)),
    refuse("--eval-micro-batch-size > 1", "hdp", "leave it at 1", above("eval_micro_batch_size", 1)),
    refuse("--no-align-param-gather", "hdp", "remove it: a rank that waits in a ring must not delay another rank's "
           "parameters", ~given("align_param_gather")),
    refuse("--ddp-average-in-collective", "hdp", "remove it: the loss is divided once, for all tokens of the step"),
    refuse("--result-rejected-tracker-filename", "hdp", "remove it: iterations cannot be skipped"),
    refuse("--optimizer", "hdp", "use adam, sgd, muon or lion: others fail here, or differ from one process",
           ~equals("optimizer", "adam", "sgd", "muon", "dist_muon", "lion")),
)  # fmt: skip
