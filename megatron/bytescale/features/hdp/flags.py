"""Hybrid data parallelism (ByteScale section 5): each document gets as many data-parallel ranks as it needs."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.config.hdp import NORMALIZATIONS, HdpConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.hdp.table import planner_help, planner_names
from bytescale_ext.plan.setup.costs import slowest_stage
from bytescale_ext.plan.setup.planner import balance_of, share_of_experts
from bytescale_ext.plan.step.sizes import RING_FORMS
from megatron.bytescale.arguments.batch_schedule import StepSizes, batch_schedule_of, schedule_overrides
from megatron.bytescale.arguments.conditions import given
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.features.hdp.refusals import REFUSALS

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


MEGATRON_LOSS_SCALE = 2**32
LARGEST_FP16_LOG2 = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of hybrid data parallelism."""
    group = parser.add_argument_group("bytescale: hybrid data parallelism")
    group.add_argument(
        "--hybrid-data-parallel",
        action="store_true",
        help="Give each document as many data-parallel ranks as it needs, and pack short documents.",
    )
    group.add_argument(
        "--hdp-tokens-per-rank",
        type=int,
        metavar="C",
        help="Maximum tokens of a micro-batch on one rank. A document of s tokens gets at least ceil(s / C) ranks.",
    )
    group.add_argument(
        "--hdp-global-tokens",
        type=int,
        metavar="T",
        help="A training step consists of the next documents with up to T tokens in total. Evaluation steps and "
        "Megatron's learning-rate schedule still use --global-batch-size. Default: --global-batch-size documents.",
    )
    group.add_argument("--hdp-balance", choices=["auto", *planner_names()], help=planner_help())
    group.add_argument(
        "--hdp-ranks-per-node",
        type=int,
        metavar="N",
        help="Keep rings of up to N ranks inside nodes of N ranks. Default: from LOCAL_WORLD_SIZE.",
    )
    group.add_argument(
        "--hdp-hierarchical-rings",
        choices=RING_FORMS,
        help="When to build rings over several nodes from inner rings inside nodes, which use all links between nodes. "
        "auto (default): if the costs predict that it is faster; always: if possible; off: never.",
    )
    _add_running_arguments(group)


def _add_running_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags for making, comparing, running and logging plans."""
    group.add_argument(
        "--hdp-plan-ahead", type=int, metavar="N", help="Steps planned and read ahead in the background (2)."
    )
    group.add_argument(
        "--hdp-learn-costs",
        default="on",
        metavar="on|off|FILE",
        help="on (default): plans learn the costs and the speeds of ranks while training; an activation policy that "
        "chooses shares measures the link and one layer when training starts, in about two seconds. FILE: also write "
        "the learned costs to FILE, a cost file. off: plan with given or assumed costs only, so that runs are equal.",
    )
    group.add_argument(
        "--hdp-plan-seconds",
        type=float,
        metavar="S",
        help="Time limit for the plan of one step. After it all ranks use the plan of balance none. Default: no limit.",
    )
    group.add_argument(
        "--hdp-attention-kernel", metavar="NAME", help="Attention kernel; `bytescale doctor` lists them. Default: best."
    )
    group.add_argument(
        "--hdp-static-width",
        type=int,
        metavar="W",
        help="For comparison: split every document over fixed groups of W ranks, as --context-parallel-size W does.",
    )
    group.add_argument(
        "--hdp-blend-by",
        choices=("documents", "tokens"),
        default="documents",
        help="What weights of --data-path are shares of: documents (default), or tokens, as for samples of one length.",
    )
    group.add_argument(
        "--loss-normalization",
        choices=NORMALIZATIONS,
        help="What the loss of a step is a mean over: tokens (default), documents, or groups of documents, so that "
        "each document or group counts as much as any other.",
    )
    group.add_argument(
        "--hdp-log-dir", type=Path, metavar="DIR", help="Write metrics.jsonl, and the timeline of one step, to DIR."
    )
    group.add_argument(
        "--hdp-timeline-step", type=int, metavar="N", help="Record each rank's work and its times in iteration N."
    )
    group.add_argument(
        "--hdp-memory-step",
        type=int,
        metavar="N",
        help="Measure the memory of passes and model states in iteration N, and log the largest process's. On CPU this "
        "counts the bytes of all tensors, which slows the iteration down.",
    )


@dataclass(frozen=True)
class HdpOptions(StepSizes):
    """Flags of hybrid data parallelism, and the Megatron flags that it reads.

    ``add_arguments`` describes the flags with the prefix ``hdp_``; None: not given.
    """

    hdp_tokens_per_rank: int
    hdp_global_tokens: int | None
    hdp_ranks_per_node: int | None
    hdp_plan_ahead: int | None
    hdp_plan_seconds: float | None
    hdp_attention_kernel: str | None
    hdp_static_width: int | None
    hdp_log_dir: Path | None
    loss_normalization: str | None
    hdp_timeline_step: int | None
    hdp_memory_step: int | None
    hdp_learn_costs: str
    hdp_loader: str
    eval_global_batch_size: int | None
    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    apply_rope_fusion: bool
    multi_latent_attention: bool
    fp16: bool
    loss_scale: float | None
    initial_loss_scale: float
    min_loss_scale: float
    moe_token_dispatcher_type: str
    overlap_param_gather: bool


def before_checks(options: HdpOptions) -> Overrides:
    """Check sizes, and return the Megatron arguments that hybrid data parallelism needs."""
    needed: dict[str, int | None] = {
        "--seq-length": options.seq_length,
        "--hdp-tokens-per-rank": options.hdp_tokens_per_rank,
    }
    if options.step_batch_size_schedule is None:
        needed["--global-batch-size"] = options.global_batch_size
    for flag, size in needed.items():
        if size is None:
            raise ValueError(f"--hybrid-data-parallel needs {flag}")
    schedule = schedule_overrides(options)
    if options.hdp_tokens_per_rank < 1:
        raise ValueError(f"--hdp-tokens-per-rank must be positive, got {options.hdp_tokens_per_rank}")
    if options.hdp_ranks_per_node is not None and options.hdp_ranks_per_node < 1:
        raise ValueError(f"--hdp-ranks-per-node must be at least 1, got {options.hdp_ranks_per_node}")
    _check_ranks(options)
    return {
        **schedule,
        "calculate_per_token_loss": True,  # ByteScale Eq. 1-2: one sum over all tokens, then one division
        "dataloader_type": "external",
        "micro_batch_size": 1,  # --global-batch-size then counts documents
        "eval_micro_batch_size": 1,
        "create_attention_mask_in_dataloader": False,
        "dist_ckpt_optim_fully_reshardable": True,  # allows resuming with another number of ranks
        # a kernel that counts positions by rows
        "apply_rope_fusion": options.apply_rope_fusion and not options.multi_latent_attention,
        # HybridEP takes equally many tokens from each rank, and ranks have different micro-batches
        **({"moe_hybridep_pad_uneven_dispatch_inputs": True} if options.moe_token_dispatcher_type == "flex" else {}),
        **(_gradients_in_fp16(options) if options.fp16 else {}),
    }


def _gradients_in_fp16(options: HdpOptions) -> Overrides:
    """Return a loss scale for losses that are summed over tokens, and gradient sums in float32.

    Megatron's initial scale of 2**32 is for mean losses; a sum over C tokens would overflow for dozens of steps.
    """
    scale = options.initial_loss_scale
    if options.loss_scale is None and scale == MEGATRON_LOSS_SCALE:
        of_sums = 2.0 ** (LARGEST_FP16_LOG2 - options.hdp_tokens_per_rank.bit_length())
        scale = max(options.min_loss_scale, of_sums)
    return {"accumulate_allreduce_grads_in_fp32": True, "initial_loss_scale": scale}


def _check_ranks(options: HdpOptions) -> None:
    tensor_ranks, num_stages = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    model_ranks = tensor_ranks * num_stages
    if options.world_size % model_ranks:
        pipelines = f" x --pipeline-model-parallel-size {num_stages}" if num_stages > 1 else ""
        raise ValueError(
            f"{options.world_size} processes cannot be divided among --tensor-model-parallel-size {tensor_ranks}"
            f"{pipelines}; start {(options.world_size // model_ranks + 1) * model_ranks} processes, or lower the sizes"
        )
    num_ranks = options.world_size // model_ranks
    sizes = {
        "--global-batch-size": options.global_batch_size,
        "--eval-global-batch-size": options.eval_global_batch_size or options.global_batch_size,
    }
    for flag, size in sizes.items():
        if size is None:  # steps follow a schedule
            continue
        if size < 1 or size % num_ranks:
            raise ValueError(
                f"{flag} {size} is not a multiple of the {num_ranks} data-parallel ranks, as Megatron's count of "
                f"documents requires; the next multiple is {(max(size, 0) // num_ranks + 1) * num_ranks}"
            )


def after_checks(options: HdpOptions) -> Overrides:
    """Align parameter gathers again, because Megatron does not align them without virtual stages."""
    return {"align_param_gather": True} if options.overlap_param_gather else NO_OVERRIDES


def resolve(options: HdpOptions, run: RunConfig) -> HdpConfig:
    """Return the settings of the planner and of its plan checks. Raises ValueError for an unsuitable kernel."""
    check_kernel(options.hdp_attention_kernel, run)
    names = (
        "global_tokens", "plan_ahead", "plan_seconds", "static_width", "log_dir", "timeline_step",
        "memory_step",
    )  # fmt: skip
    given = {name: getattr(options, f"hdp_{name}") for name in names}
    setup = run.decision.setup
    return HdpConfig(
        setup.cluster,
        slowest_stage(setup)[1],
        longest_sequence=setup.sequences.longest,
        rows_multiple=setup.rows_multiple,
        balance=balance_of(setup),
        num_stages=setup.mesh.num_stages,
        expert_ranks=setup.mesh.expert_ranks,
        expert_share=share_of_experts(setup),
        kernel=options.hdp_attention_kernel,
        schedule=batch_schedule_of(options.step_batch_size_schedule, options.seq_length, run.cluster.num_ranks),
        plans_offload=setup.plans_offload,
        learns_costs=options.hdp_learn_costs != "off" and options.hdp_static_width is None,
        learned_costs=_file_of_costs(options),
        loss_normalization=options.loss_normalization or NORMALIZATIONS[0],
        **{name: value for name, value in given.items() if value is not None},
    )


def _file_of_costs(options: HdpOptions) -> Path | None:
    """Return the file of learned costs. Raises ValueError for a word that is none, and for runs that learn nothing."""
    value = options.hdp_learn_costs
    if value in ("on", "off"):
        return None
    if Path(value).suffix != ".json":
        raise ValueError(f"--hdp-learn-costs {value}: give on, off, or the name of a .json file to write")
    for flag, is_on in (
        ("--hdp-static-width", options.hdp_static_width is not None),
        ("--hdp-loader ray", options.hdp_loader == "ray"),
    ):
        if is_on:
            raise ValueError(f"--hdp-learn-costs {value}: plans of {flag} learn no costs")
    return Path(value)


def check_kernel(name: str | None, run: RunConfig) -> None:
    """Raise ValueError unless the named attention kernel supports the model's heads. Does not use the device."""
    from bytescale_ext.attention.kernels.table import named_kernel  # imports torch

    if name is not None:
        device = "cuda" if run.process.on_cuda else "cpu"
        named_kernel(device, run.process.dtype, run.shape.head_dim, name)


def build(training: Training, runtime: Runtime) -> Training:
    """Train on documents: their data, attention, positions and forward step."""
    from megatron.bytescale.features.hdp import build as hdp

    return hdp.train_on_documents(training, runtime)


HDP = Feature(
    name="hdp",
    flag="--hybrid-data-parallel",
    summary="hybrid data parallelism: as many ranks per document as it needs",
    add_arguments=add_arguments,
    is_on=given("hybrid_data_parallel"),
    options=HdpOptions,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    after_checks=after_checks,
    reads_cost=True,
    refusals=REFUSALS,
)
