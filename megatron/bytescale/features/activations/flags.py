"""Activation policies (MEMO; ByteScale section 5.2): saved tensors are kept, swapped to host memory or recomputed."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.config.memory.activations import ActivationConfig
from bytescale_ext.config.memory.offload import planned_offload
from bytescale_ext.config.run import RunConfig
from bytescale_ext.config.slices import DocumentSliceConfig
from bytescale_ext.measure.host_memory import free_host_bytes
from bytescale_ext.plan.activation.load import (
    COLLECTIVE_BYTES_PER_SECOND,
    RESIDENT_LAYERS,
    Machine,
    cost_of_rates,
)
from bytescale_ext.plan.activation.policies import POLICIES
from bytescale_ext.plan.cost.model_cost import LINK_BYTES_PER_SECOND, ModelCost
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import num_parameters
from megatron.bytescale.arguments.stage_layers import slice_lengths, sliced_options, stage_settings
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

RATES = (650e12, 600e12, 500e12)
"""FLOPs per second of matrix products, attention forward and backward, used without a cost file: one H200."""

OFFLOADED_PARAMETER_BYTES = 16
"""Bytes of host memory for each parameter whose optimizer states Megatron keeps there, in float32."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of activation policies."""
    group = parser.add_argument_group("bytescale: activations")
    group.add_argument(
        "--activation-policy",
        choices=POLICIES,
        default="none",
        help="How to treat the tensors that layers save for the backward pass. memo: swap layer inputs and attention "
        "outputs to host memory, and as much of the rest as the link can carry; recompute what remains, but never "
        "attention. priced: the same, but rebuild what is cheap to rebuild, and use free device memory. offload: swap "
        "a share of every tensor; with --hybrid-data-parallel the plan chooses the share of each micro-batch, so that "
        "a long sequence needs fewer ranks. auto: the policy with the least predicted time. Default: none. "
        "`bytescale activations` predicts the effect of each on a model.",
    )
    texts = {
        "--swap-fraction F": "Swap this share of the tokens. With memo and priced it is their alpha; with none, the "
        "share of all tensors.",
        "--recompute-fraction F": "Recompute this share of the tokens, without attention: 1 alone is full recompute "
        "except attention. What is neither swapped nor recomputed stays on the device.",
        "--host-memory-gb G": "Host memory of each process for activations, allocated once, when training starts. "
        "Every policy that swaps needs it. With --state-policy auto, for model states too.",
        "--device-memory-gb G": "The most device memory for activations, besides parameters, gradients and optimizer "
        "states. priced, offload and auto need it, except offload with --hybrid-data-parallel, where "
        "--hdp-tokens-per-rank sets the limit. With --state-policy auto, for model states too.",
        "--link-gb-per-second B": "Speed of a link between device and pinned host memory, one way, when one GPU uses "
        "it (55).",
    }
    for words, text in texts.items():
        flag, metavar = words.split()
        group.add_argument(flag, type=float, metavar=metavar, help=text)
    group.add_argument(
        "--gpus-per-link",
        type=int,
        metavar="N",
        help="GPUs of this run that share one link to host memory, as behind a PCIe switch: each is planned with a "
        "share of its speed (1). What is measured at start is shared already. "
        "scripts/bench/activation/gpu_activations_calibrate.py measures it.",
    )
    group.add_argument(
        "--no-measured-speeds",
        action="store_true",
        help="Plan with assumed speeds where none are given, equal in every run. Default: a policy that chooses shares "
        "measures the link and one layer when training starts, in about two seconds, on all ranks together.",
    )


def is_on(args: Any) -> bool:
    """Return whether activations follow a plan; a memory plan needs one too."""
    shares = (args.swap_fraction, args.recompute_fraction)
    has_plan = args.memory_plan is not None or args.record_memory_plan is not None
    return args.activation_policy != "none" or shares != (None, None) or has_plan


def before_checks(args: Any) -> None:
    """Load no masks for samples that our attention computes; a mask of all pairs of tokens would outgrow the rest."""
    if args.transformer_impl == "local":
        args.create_attention_mask_in_dataloader = False


def resolve(args: Any, run: RunConfig) -> ActivationConfig:
    """Return the policy with its budgets; with ``--state-policy auto``, with what the chosen model states leave.

    Raises:
        ValueError: settings that do not fit together, budgets that are missing or too small.
    """
    config, hdp = policy_of(args, run), run.find(HdpConfig)
    if args.state_policy == "auto":
        from megatron.bytescale.features.states.state_choice import beside_states

        config = beside_states(args, run, config)
    if hdp is not None and hdp.plans_offload:  # all stages offload the same share: what the fullest stage needs
        _check_planned_offload(args, min(run.stage_layers))
        config = replace(config, layers=replace(config.layers, num_layers=max(run.stage_layers)))
        config = replace(config, offload=planned_offload(hdp, config.machine, config.cost, config.largest))
        config.check_fits()
        return config
    documents = run.find(DocumentSliceConfig)
    if documents is not None and documents.choice is not None:
        config = replace(config, options=sliced_options(args, run, documents), stage=run.process.stage)
        config.check_fits()
        return config
    stages = [config.on_stage(stage_settings(args, run, stage)) for stage in range(len(run.stage_layers))]
    for one in stages:
        one.check_fits()
    return stages[run.process.stage]


def policy_of(args: Any, run: RunConfig) -> ActivationConfig:
    """Return the policy on the first stage, with the whole budgets and before it is checked. Raises ValueError."""
    _check_shares(args)
    return ActivationConfig(
        policy=args.activation_policy,
        swap=args.swap_fraction,
        recompute=args.recompute_fraction,
        machine=machine_of(args, run.shape),
        cost=cost_in_seconds(run),
        num_tokens=run.cluster.tokens_per_rank,
        length=args.seq_length,
        slices=slice_lengths(run),
        layers=stage_settings(args, run, 0),
        assumed=assumptions(args, run),
        measures=measures(args, run),
    )


def cost_in_seconds(run: RunConfig) -> ModelCost:
    """Return the measured cost of the model, or one from assumed rates."""
    return run.cost or cost_of_rates(run.shape, *RATES, tensor_parallel=run.process.tensor_parallel)


def assumptions(args: Any, run: RunConfig) -> str:
    """Return a line about the speeds that plans assume, and the flags that replace them; "" where all are given."""
    speeds = []
    if args.link_gb_per_second is None and args.host_memory_gb:
        speeds.append(
            f"{LINK_BYTES_PER_SECOND / 1e9:g} GB/s to host memory (give --link-gb-per-second; "
            "scripts/bench/activation/gpu_activations_calibrate.py measures it)"
        )
    if run.cost is None:
        products, forward, backward = (rate / 1e12 for rate in RATES)
        between = f", {COLLECTIVE_BYTES_PER_SECOND / 1e9:g} GB/s between tensor-parallel ranks"
        speeds.append(
            f"{products:g} TFLOP/s in matrix products, {forward:g} and {backward:g} in attention forward and backward"
            f"{between if args.tensor_model_parallel_size > 1 else ''} (give --cost-file; `bytescale profile` measures "
            "them)"
        )
    return f"> bytescale: assumed, not measured: {'; '.join(speeds)}" if speeds else ""


def measures(args: Any, run: RunConfig) -> tuple[str, ...]:
    """Return what is measured at start: what was not given, where the policy chooses shares by it.

    Memory plans need the same shares in two runs, so they plan with what is assumed or given.
    """
    is_fixed = args.activation_policy == "none" or (args.swap_fraction, args.recompute_fraction) != (None, None)
    has_plan = args.memory_plan is not None or args.record_memory_plan is not None
    if args.no_measured_speeds or is_fixed or has_plan:
        return ()
    found = ["layers"] * (run.cost is None)
    return (*found, "link") if args.link_gb_per_second is None and args.host_memory_gb else tuple(found)


def _check_shares(args: Any) -> None:
    """Raise ValueError for shares outside 0 to 1, or shares that the policy does not take."""
    if args.activation_policy == "auto" and (args.swap_fraction, args.recompute_fraction) != (None, None):
        raise ValueError("--activation-policy auto chooses the shares: remove --swap-fraction and --recompute-fraction")
    if args.activation_policy == "offload" and args.recompute_fraction:
        raise ValueError("--activation-policy offload recomputes nothing: remove --recompute-fraction")
    for flag, share in (("--swap-fraction", args.swap_fraction), ("--recompute-fraction", args.recompute_fraction)):
        if share is not None and not 0.0 <= share <= 1.0:
            raise ValueError(f"{flag} {share:g} must be a share of the tokens, from 0 to 1")
    if (args.swap_fraction or 0.0) + (args.recompute_fraction or 0.0) > 1.0:
        raise ValueError(
            f"--swap-fraction {args.swap_fraction:g} and --recompute-fraction {args.recompute_fraction:g} sum to more "
            "than 1; tokens that are neither swapped nor recomputed stay on the device"
        )


def _check_planned_offload(args: Any, layers_of_process: int) -> None:
    """Raise ValueError for settings with which HDP plans cannot choose the shares."""
    policy = "--activation-policy offload by the plan of --hybrid-data-parallel"
    by_share = "or give --swap-fraction, the same share for all micro-batches"
    if args.device_memory_gb is not None:
        raise ValueError(f"{policy}: --hdp-tokens-per-rank decides what the device holds; remove --device-memory-gb")
    if args.hdp_static_width is not None:
        raise ValueError(
            f"{policy} does not work with --hdp-static-width, whose widths are fixed: remove it, {by_share}"
        )
    if args.num_experts:
        raise ValueError(
            f"{policy} does not work with --num-experts: what experts save stays on the device, so a share of the rest "
            f"does not make room for more tokens; use priced, {by_share}"
        )
    if args.seq1f1b_slices not in (None, 1):
        raise ValueError(
            f"{policy} does not work with --seq1f1b-slices, which already hold less; remove one, {by_share}"
        )
    if layers_of_process <= RESIDENT_LAYERS:
        raise ValueError(
            f"{policy} keeps {RESIDENT_LAYERS} layers of each process on the device, and a process has "
            f"{layers_of_process}: use fewer pipeline stages, {by_share}"
        )


def machine_of(args: Any, shape: ModelShape) -> Machine:
    """Return the budgets of one process. Raises ValueError for a missing, impossible or negative one."""
    policy, is_planned = args.activation_policy, (args.swap_fraction, args.recompute_fraction) == (None, None)
    if args.host_memory_gb is None and (policy != "none" or args.swap_fraction):
        raise ValueError("give --host-memory-gb, the host memory of each process for activations")
    is_planned = is_planned and not (args.hybrid_data_parallel and policy == "offload")
    if args.device_memory_gb is None and policy in ("priced", "offload", "auto") and is_planned:
        raise ValueError(f"--activation-policy {policy} needs --device-memory-gb, the device memory for activations")
    for flag, value in (("--host-memory-gb", args.host_memory_gb), ("--device-memory-gb", args.device_memory_gb)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{flag} {value:g} is not an amount of memory")
    link = LINK_BYTES_PER_SECOND / 1e9 if args.link_gb_per_second is None else args.link_gb_per_second
    if not 0 < link < math.inf:
        raise ValueError(f"--link-gb-per-second {link:g} must be positive")
    sharers = 1 if args.gpus_per_link is None else args.gpus_per_link
    if sharers < 1:
        raise ValueError(f"--gpus-per-link {sharers} must be at least 1")
    host = args.host_memory_gb or 0.0
    optimizer = optimizer_host_bytes(args, shape) / 1e9
    free = max(0.0, free_host_bytes() / 1e9 / local_processes() - optimizer)
    if host > free and not args.fake_process_group:  # a dry run is of another machine
        beside = f" beside {optimizer:.4g} GB of the optimizer (--optimizer-cpu-offload)" if optimizer else ""
        raise ValueError(
            f"--host-memory-gb {host:g} for each of {local_processes()} processes of this machine: each has "
            f"{free:.4g} GB of its free memory{beside}; give at most that"
        )
    device = math.inf if args.device_memory_gb is None else args.device_memory_gb
    return Machine(device * 1e9, host * 1e9, link * 1e9 / sharers)


def optimizer_host_bytes(args: Any, shape: ModelShape) -> float:
    """Return the host memory of the optimizer in a process: a copy, two moments and a gradient of each parameter."""
    if not getattr(args, "optimizer_cpu_offload", False):
        return 0.0
    parameters = num_parameters(shape, args.tensor_model_parallel_size)
    parameters /= args.pipeline_model_parallel_size * (args.data_parallel_size if args.use_distributed_optimizer else 1)
    return OFFLOADED_PARAMETER_BYTES * args.optimizer_offload_fraction * parameters


def local_processes() -> int:
    """Return the processes of the run on this machine, by torchrun's LOCAL_WORLD_SIZE."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def build(training: Training, runtime: Runtime) -> Training:
    """Plan the saved tensors of each layer, micro-batch by micro-batch."""
    from megatron.bytescale.features.activations import build as activations

    return activations.plan_activations(training, runtime)


ACTIVATIONS = Feature(
    name="activations",
    flag="--activation-policy",
    summary="activation policies: saved tensors are kept, swapped or recomputed",
    add_arguments=add_arguments,
    is_on=is_on,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    needs="--activation-policy, --swap-fraction or --recompute-fraction",
    reads_cost=True,
)
