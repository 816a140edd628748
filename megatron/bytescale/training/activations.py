"""Activation policies in training: the flags, what they do not go together with, and the plan of a micro-batch."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bytescale_ext.config import HdpConfig
from bytescale_ext.cost_file import check_same_model, read_cost
from bytescale_ext.plan.activation import (
    RESIDENT_LAYERS,
    ActivationPlan,
    LayerLoad,
    Machine,
    cost_of_rates,
    load_of_tokens,
)
from bytescale_ext.plan.activation_forecast import forecast
from bytescale_ext.plan.activation_policy import POLICIES, given_plan, in_gigabytes, make_plan
from bytescale_ext.plan.cost import ModelCost
from bytescale_ext.plan.memory_step import StepMemory
from bytescale_ext.plan.model_states import num_parameters
from megatron.bytescale.training import seq1f1b
from megatron.bytescale.training.activation_offload import PlannedOffload, planned_offload, plans_offload

RATES = (650e12, 600e12, 500e12)
"""FLOPs per second of matrix products, attention forward and backward, where nothing was measured: one H200."""

OFFLOADED_PARAMETER_BYTES = 16
"""Of a parameter whose optimizer states Megatron holds in host memory, in float32."""

_LEFT_ALONE = {"moe", "moe_act", "shared_experts"}
_OWN_RECOMPUTE = "the policy recomputes: choose one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags to Megatron's parser."""
    group = parser.add_argument_group("bytescale: activations")
    group.add_argument(
        "--activation-policy",
        choices=POLICIES,
        default="none",
        help="What becomes of the tensors that layers save for the backward pass. memo: layer inputs and attention "
        "outputs go to host memory, and as much of the rest as the link carries; what is left is recomputed, attention "
        "never. priced: likewise, but what is cheap to rebuild is never moved and free device memory is used. offload: "
        "a share of everything goes to host memory; with --hybrid-data-parallel the plan gives each micro-batch its "
        "own, so that a long sequence needs fewer ranks. auto: the one with the least predicted time. Default: none. "
        "`bytescale activations` prints what each does to a model.",
    )
    texts = {
        "--swap-fraction F": "Swap this share of the tokens. With memo and priced it is their alpha; with none, the "
        "share of all tensors.",
        "--recompute-fraction F": "Recompute this share of the tokens, without attention: 1 alone is full recompute "
        "except attention. What neither swaps nor recomputes stays on the device.",
        "--host-memory-gb G": "Host memory of each process for activations: taken once, when training starts, and "
        "never more. Whatever swaps needs it.",
        "--device-memory-gb G": "The most device memory for activations, beside parameters, gradients and optimizer "
        "states: priced, offload and auto plan with it, and need it; not offload with --hybrid-data-parallel, where "
        "--hdp-tokens-per-rank says it.",
        "--host-link-gb-per-second B": "Speed between device and pinned host memory, one way (55).",
    }
    for words, text in texts.items():
        flag, metavar = words.split()
        group.add_argument(flag, type=float, metavar=metavar, help=text)
    group.add_argument(
        "--activation-cost",
        type=Path,
        metavar="FILE",
        help="Measured costs (`bytescale profile`) for the plan. Default: those of --hdp-cost, else rates of an H200.",
    )
    group.add_argument(
        "--memory-plan",
        type=Path,
        metavar="FILE",
        help="A plan of `bytescale memory-plan --output FILE` for this model: on a GPU its memory is reserved at once, "
        "and swapped layers come back to buffers of the planned size.",
    )
    group.add_argument(
        "--chunked-cross-entropy",
        type=int,
        metavar="TOKENS",
        help="Compute output layer and loss for TOKENS tokens at a time, and once more in the backward pass: so the "
        "logits of a long sequence never exist together. Needs no policy.",
    )


@dataclass(frozen=True)
class ActivationConfig:
    """What the user asked for; made before anything is built.

    Attributes:
        policy: one of ``POLICIES``.
        swap, recompute: given shares, or None.
        machine: memory and link that the plan may use.
        cost: of the model, for predictions.
        num_tokens: of the largest micro-batch on one rank.
        length: of the longest sequence.
        slices: what runs at a time of a micro-batch, in proportion; one without ``--seq1f1b-splits``.
        layers_of_stage: layers of one process (of all its model chunks).
        resident_layers: see ``LayerLoad``.
        in_flight: see ``LayerLoad``.
        element_bytes: of one element of an activation.
        loss_tokens: tokens whose logits exist together, or None.
        sequence_parallel, fused_norms: see ``layer_tensors``.
        offload: what the HDP plan offloads within, where it names the shares; else None.
        memory: the plan of ``--memory-plan``, or None.
    """

    policy: str
    swap: float | None
    recompute: float | None
    machine: Machine
    cost: ModelCost
    num_tokens: int
    length: int
    slices: tuple[int, ...]
    layers_of_stage: int
    resident_layers: int
    in_flight: int
    element_bytes: int
    loss_tokens: int | None
    sequence_parallel: bool
    fused_norms: bool = False
    offload: PlannedOffload | None = None
    memory: StepMemory | None = None

    def load(self, num_tokens: int, forward_seconds: float, backward_seconds: float) -> LayerLoad:
        """One micro-batch of a rank, by its tokens and the times of one layer."""
        load = load_of_tokens(
            self.cost,
            num_tokens,
            forward_seconds,
            backward_seconds,
            num_layers=self.layers_of_stage,
            element_bytes=self.element_bytes,
            sequence_parallel=self.sequence_parallel,
            fused_norms=self.fused_norms,
            loss_tokens=self.loss_tokens,
        )
        return replace(load, resident_layers=self.resident_layers, in_flight=self.in_flight)

    @property
    def largest(self) -> LayerLoad:
        """The largest micro-batch, or slice of one: tokens of the longest sequence, on as many ranks as it needs.

        Slices are taken to be equal in time.
        """
        width = -(-self.length // self.num_tokens)
        sequences = max(1, self.num_tokens // self.length) / len(self.slices)
        seconds = [
            sequences * cost.sequence_cost(min(self.length, self.num_tokens * width), width) + cost.g
            for cost in (self.cost.forward, self.cost.backward)
        ]
        return self.load(-(-self.num_tokens * max(self.slices) // sum(self.slices)), *seconds)

    def plan(self, load: LayerLoad, share: float = 0.0) -> ActivationPlan:
        """The plan of a micro-batch; ``share``: its own in the HDP plan, which the policy offload takes.

        Raises:
            ValueError: the policy does not fit; not for a load smaller than one that fits.
        """
        resident = min(self.resident_layers, load.num_layers)
        if self.offload is not None:
            return given_plan("offload", share, None, resident)
        if self.swap is None and self.recompute is None:
            return make_plan(self.policy, load, self.machine)
        return given_plan(self.policy, self.swap, self.recompute, resident)


def refusals(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """(flag, what to do instead) of each setting that does not go together with an activation policy."""
    modules = set(args.recompute_modules or ["core_attn"])
    if args.recompute_granularity == "full" or (args.recompute_granularity and not modules <= _LEFT_ALONE):
        yield "--recompute-granularity", f"{_OWN_RECOMPUTE}; of --recompute-modules those of experts combine"
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(args, name):
            yield f"--{name.replace('_', '-')} > 0", "give 0: what is recomputed must be what was computed"
    unlike = "its layers are not Megatron's TransformerLayer: remove it"
    reasons = {
        "cpu_offloading_num_layers": _OWN_RECOMPUTE.replace("recomputes", "swaps"),
        "fine_grained_activation_offloading": _OWN_RECOMPUTE.replace("recomputes", "swaps"),
        "enable_cuda_graph": "a graph's memory cannot be swapped: remove it",
        "external_cuda_graph": "a graph's memory cannot be swapped: remove it",
        "use_megatron_fsdp": "use --use-distributed-optimizer",
        "use_torch_fsdp2": "use --use-distributed-optimizer",
        "overlap_moe_expert_parallel_comm": "it has a schedule of its own",
        "moe_paged_stash": "it stores activations of its own: choose one",
        "multi_latent_attention": unlike,
        "experimental_attention_variant": unlike,
        "hybrid_layer_pattern": unlike,
        "hybrid_override_pattern": unlike,
        "heterogeneous_layers_config_path": unlike,
        "heterogeneous_layers_config_encoded_json": unlike,
        "spec": unlike,
        "mtp_num_layers": unlike,
        "fp8": "use bf16",
        "fp4": "use bf16",
    }
    names = {"fp8": "--fp8-format", "fp4": "--fp4-format"}
    for name, instead in reasons.items():
        if getattr(args, name, None):
            yield names.get(name, f"--{name.replace('_', '-')}"), instead
    if getattr(args, "cuda_graph_impl", "none") != "none":
        yield "--cuda-graph-impl", "a graph's memory cannot be swapped: remove it"
    if getattr(args, "mlp_chunks_for_training", 1) > 1:
        yield "--mlp-chunks-for-training", "remove it"


def activation_config(args: argparse.Namespace, hdp: HdpConfig | None) -> ActivationConfig | None:
    """The frozen configuration, or None where no policy is asked for. Call it after Megatron's own checks.

    Raises:
        ValueError: settings that do not go together, budgets that are missing or too small.
    """
    shares = (args.swap_fraction, args.recompute_fraction)
    check_chunked_loss(args)
    if args.activation_policy == "none" and shares == (None, None) and args.memory_plan is None:
        for name in ("host_memory_gb", "device_memory_gb", "activation_cost", "host_link_gb_per_second"):
            if getattr(args, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} needs --activation-policy, or --swap-fraction or --recompute-fraction")
        return None
    for flag, instead in refusals(args):
        raise ValueError(f"activation policies do not work with {flag}: {instead}")
    check_shares(args)
    machine = machine_of(args)
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    micro_batch_tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
    slices = slices_of(args, hdp)
    in_flight = stages * (2 if virtual > 1 else 1) + len(slices) - 1 + (stages - 1) * args.seq1f1b_eager
    config = ActivationConfig(
        policy=args.activation_policy,
        swap=args.swap_fraction,
        recompute=args.recompute_fraction,
        machine=machine,
        cost=cost_of(args),
        num_tokens=micro_batch_tokens if hdp is None else hdp.tokens_per_rank,
        length=args.seq_length,
        layers_of_stage=-(-args.num_layers // stages),
        slices=slices,
        resident_layers=RESIDENT_LAYERS if in_flight == 1 else 0,
        in_flight=in_flight,
        element_bytes=args.params_dtype.itemsize,
        loss_tokens=args.chunked_cross_entropy,
        sequence_parallel=args.sequence_parallel,
        fused_norms=args.transformer_impl == "transformer_engine",
    )
    if hdp is not None and plans_offload(args):
        config = replace(config, offload=planned_offload(args, hdp, machine, config.cost, config.largest))
    plan = config.plan(config.largest)
    check_fits(plan, config.largest, machine)
    if args.memory_plan is None:
        return config
    if config.offload is not None:
        raise ValueError("--memory-plan needs one share for all micro-batches: give --swap-fraction, or remove it")
    from megatron.bytescale.training.activation_memory import read_memory_plan  # imports torch, as flags must not

    return replace(config, memory=read_memory_plan(args, config.largest.num_tokens, plan))


def check_fits(plan: ActivationPlan, load: LayerLoad, machine: Machine) -> None:
    """Raise ValueError where the largest micro-batch takes more than a budget, with the budget that would do."""
    needed = forecast(plan, load, machine)
    what = f"micro-batches of {load.num_tokens} tokens with {plan.swap:.3g} of the tokens swapped"
    if needed.host_bytes > machine.host_bytes * (1 + 1e-9):
        raise ValueError(
            f"{what} take {in_gigabytes(needed.host_bytes)} GB of host memory, and --host-memory-gb is "
            f"{machine.host_bytes / 1e9:.4g}: give at least that, or swap less"
        )
    if needed.device_bytes > machine.device_bytes * (1 + 1e-9):
        raise ValueError(
            f"{what} take {in_gigabytes(needed.device_bytes)} GB of device memory, and --device-memory-gb is "
            f"{machine.device_bytes / 1e9:.4g}: give at least that, or fewer tokens, or a policy that keeps less"
        )


def slices_of(args: argparse.Namespace, hdp: HdpConfig | None) -> tuple[int, ...]:
    """Tokens of the slices of a micro-batch, or their proportion; one without slices. Raises ValueError."""
    if not seq1f1b.is_on(args):
        return (1,)
    if hdp is not None:
        return (1,) * args.seq1f1b_splits
    from megatron.bytescale.runtime import model_shape  # imports Megatron, and flags are added before that

    return seq1f1b.slice_config(args, model_shape(args)).lengths


def check_chunked_loss(args: argparse.Namespace) -> None:
    """Raise ValueError for a ``--chunked-cross-entropy`` that cannot be."""
    if args.chunked_cross_entropy is None:
        return
    if args.chunked_cross_entropy < 1:
        raise ValueError(f"--chunked-cross-entropy {args.chunked_cross_entropy} must be at least 1 token")
    for name in ("mtp_num_layers", "defer_embedding_wgrad_compute", "logits_save_dir", "logits_load_dir"):
        if getattr(args, name, None):
            raise ValueError(f"--chunked-cross-entropy does not work with --{name.replace('_', '-')}: remove one")


def check_shares(args: argparse.Namespace) -> None:
    """Raise ValueError for shares that are none, or do not go with the policy."""
    if args.activation_policy == "auto" and (args.swap_fraction, args.recompute_fraction) != (None, None):
        raise ValueError("--activation-policy auto chooses the shares: remove --swap-fraction and --recompute-fraction")
    if args.activation_policy == "offload" and args.recompute_fraction:
        raise ValueError("--activation-policy offload recomputes nothing: remove --recompute-fraction")
    for flag, share in (("--swap-fraction", args.swap_fraction), ("--recompute-fraction", args.recompute_fraction)):
        if share is not None and not 0.0 <= share <= 1.0:
            raise ValueError(f"{flag} {share:g} is not a share of the tokens, from 0 to 1")
    if (args.swap_fraction or 0.0) + (args.recompute_fraction or 0.0) > 1.0:
        raise ValueError(
            f"--swap-fraction {args.swap_fraction:g} and --recompute-fraction {args.recompute_fraction:g} sum to more "
            "than 1; what neither swaps nor recomputes stays on the device"
        )


def machine_of(args: argparse.Namespace) -> Machine:
    """The budgets of one process. Raises ValueError for a missing, impossible or negative one."""
    policy, is_planned = args.activation_policy, (args.swap_fraction, args.recompute_fraction) == (None, None)
    if args.host_memory_gb is None and (policy != "none" or args.swap_fraction):
        raise ValueError("give --host-memory-gb, the host memory of each process for activations")
    is_planned = is_planned and not plans_offload(args)
    if args.device_memory_gb is None and policy in ("priced", "offload", "auto") and is_planned:
        raise ValueError(f"--activation-policy {policy} needs --device-memory-gb, what activations may take of it")
    for flag, value in (("--host-memory-gb", args.host_memory_gb), ("--device-memory-gb", args.device_memory_gb)):
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{flag} {value:g} is no amount of memory")
    link = 55.0 if args.host_link_gb_per_second is None else args.host_link_gb_per_second
    if not 0 < link < math.inf:
        raise ValueError(f"--host-link-gb-per-second {link:g} must be positive")
    host = args.host_memory_gb or 0.0
    optimizer = optimizer_host_bytes(args) / 1e9
    free = max(0.0, psutil.virtual_memory().available / 1e9 / local_processes() - optimizer)
    if host > free:
        beside = f" beside {optimizer:.4g} GB of the optimizer (--optimizer-cpu-offload)" if optimizer else ""
        raise ValueError(
            f"--host-memory-gb {host:g} for each of {local_processes()} processes of this machine: each has "
            f"{free:.4g} GB of its free memory{beside}; give at most that"
        )
    device = math.inf if args.device_memory_gb is None else args.device_memory_gb
    return Machine(device * 1e9, host * 1e9, link * 1e9)


def optimizer_host_bytes(args: argparse.Namespace) -> float:
    """Host memory that the optimizer will take of a process: a copy, two moments and a gradient of each parameter."""
    if not getattr(args, "optimizer_cpu_offload", False):
        return 0.0
    from megatron.bytescale.runtime import model_shape  # imports Megatron, and flags are added before that

    parameters = num_parameters(model_shape(args), args.tensor_model_parallel_size)
    parameters /= args.pipeline_model_parallel_size * (args.data_parallel_size if args.use_distributed_optimizer else 1)
    return OFFLOADED_PARAMETER_BYTES * args.optimizer_offload_fraction * parameters


def local_processes() -> int:
    """Processes of the run on this machine, as torchrun tells them."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def cost_of(args: argparse.Namespace) -> ModelCost:
    """Measured costs of this model, or those of ``RATES``. Raises ValueError for a file of another model."""
    from megatron.bytescale.runtime import model_shape  # imports Megatron, and flags are added before that

    path = args.activation_cost or getattr(args, "hdp_cost", None)
    ranks, dtype = args.tensor_model_parallel_size, str(args.params_dtype).removeprefix("torch.")
    if path is None:
        return cost_of_rates(model_shape(args), *RATES, tensor_parallel=ranks)
    return check_same_model(read_cost(path), model_shape(args), ranks, dtype, path)
