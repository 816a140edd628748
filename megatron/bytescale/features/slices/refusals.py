"""Megatron settings that pipelines in slices refuse; ``features/hdp/refusals.py`` has more."""

from __future__ import annotations

from megatron.bytescale.arguments.conditions import above, chosen, given, where
from megatron.bytescale.arguments.layer_settings import AttentionChoice, Balancing
from megatron.bytescale.arguments.refusals import refuse

REFUSALS = (
    refuse("--context-parallel-size > 1", "slices", "leave it at 1: its zigzag shares contain tokens from both ends of "
           "the sequence", above("context_parallel_size", 1)),
    refuse("--hybrid-context-parallel", "slices", "use --hybrid-data-parallel in its place"),
    refuse("--defer-embedding-wgrad-compute", "slices", "remove it: it assumes that the first forward is also the "
           "first backward"),
    refuse("--delay-wgrad-compute", "slices", "remove it: it pairs forward and backward passes in another order"),
    refuse("--overlap-param-gather-with-optimizer-step", "slices", "give --overlap-param-gather alone"),
    refuse("--moe-router-load-balancing-type of slices", "slices", "use aux_loss, seq_aux_loss or none, and "
           "--moe-router-enable-expert-bias if wanted; global_aux_loss needs --hybrid-data-parallel, as Megatron's "
           "own depends on the order of micro-batches, and the others choose experts by tokens outside the slice",
           given("num_experts") & ~given("hybrid_data_parallel")
           & where(Balancing, lambda balancing: balancing.is_beyond("aux_loss", "seq_aux_loss", "none"))),
    refuse("--moe-expert-capacity-factor", "slices", "remove it: the dropped tokens would depend on the slices",
           chosen("moe_expert_capacity_factor")),
    refuse("--overlap-moe-expert-parallel-comm", "slices", "remove it: it runs its own schedule"),
    refuse("--use-megatron-fsdp", "slices", "use --use-distributed-optimizer"),
    refuse("--use-torch-fsdp2", "slices", "use --use-distributed-optimizer"),
    refuse("--multi-latent-attention without --hybrid-data-parallel", "slices", "add --hybrid-data-parallel: its RoPE "
           "is inside attention, which does not know the positions of slices of samples",
           given("multi_latent_attention") & ~given("hybrid_data_parallel")),
    refuse("--mtp-num-layers without --hybrid-data-parallel", "slices", "add --hybrid-data-parallel, whose loader "
           "provides the tokens of the next slice", given("mtp_num_layers") & ~given("hybrid_data_parallel")),
    refuse("--attention-backend", "slices", "remove it: slices use their own kernels",
           where(AttentionChoice, AttentionChoice.is_chosen)),
    refuse("--use-kitchen-attention", "slices", "remove it: slices use their own kernels"),
    refuse("--fp8-format without --hybrid-data-parallel", "slices", "add it: its plans pad slices to whole blocks",
           given("fp8") & ~given("hybrid_data_parallel")),
    refuse("--fine-grained-activation-offloading", "slices", "remove it: it restores the oldest activations, not the "
           "last slice's"),
    refuse("--cpu-offloading-num-layers", "slices", "remove it: it restores the oldest activations, not the last "
           "slice's"),
    refuse("--dataloader-inter-document-masking", "slices", "use --hybrid-data-parallel, where documents never attend "
           "to each other"),
    refuse("--reset-attention-mask", "slices", "use --hybrid-data-parallel, where documents never attend to each "
           "other"),
)  # fmt: skip
