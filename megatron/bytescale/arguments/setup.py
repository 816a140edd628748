"""Derives the ``Setup`` of a training from Megatron's arguments and the options of our features."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any, Final

from bytescale_ext.config.memory.tables import memories_of_stages
from bytescale_ext.measure.devices import scaled_device_cost
from bytescale_ext.measure.host_memory import free_host_bytes, local_processes
from bytescale_ext.plan.cost.model_cost import (
    LINK_BYTES_PER_SECOND,
    ModelCost,
    with_score_products,
    with_second_forward,
)
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.memory.model_states import num_parameters
from bytescale_ext.plan.setup.costs import with_expert_exchange
from bytescale_ext.plan.setup.memory import affordable_keys
from bytescale_ext.plan.setup.setup import (
    AUTO,
    FULL,
    NO_RECOMPUTE,
    Budget,
    Mesh,
    Numerics,
    Planning,
    Sequences,
    Setup,
    States,
)
from bytescale_ext.plan.states.pages import FLOAT_BYTES
from bytescale_ext.plan.states.timeline import ADAM_BYTES_PER_SECOND, IN_HOST
from megatron.bytescale.arguments.layer_settings import Balancing
from megatron.bytescale.arguments.model_shape import cluster, measured_cost, model_shape, stage_layers
from megatron.bytescale.arguments.operators import operators_of
from megatron.bytescale.arguments.optimizer import state_sizes_of
from megatron.bytescale.arguments.options import options_of
from megatron.bytescale.features.activations.flags import (
    PolicyFlags,
    PolicyOptions,
    check_planned_offload,
    policy_options,
)
from megatron.bytescale.features.fp8 import Fp8Options
from megatron.bytescale.features.qk_clip import LOGIT_FLAGS
from megatron.bytescale.features.slices.flags import SliceFlags, SliceOptions, sample_slice_lengths, slice_options
from megatron.bytescale.features.states.flags import (
    DeviceFlags,
    StateFlags,
    StateOptions,
    allowed_stages,
    state_options,
)
from megatron.bytescale.features.tables.flags import TableOptions

OFFLOADED_PARAMETER_BYTES: Final = 16
"""Bytes of host memory per parameter whose optimizer states Megatron keeps there in float32."""


def setup_of(args: Any) -> Setup:
    """Return the setup of a training, from arguments that Megatron has checked.

    Raises ValueError for options that do not fit together, and for missing or impossible budgets.
    """
    policy = policy_options(options_of(args, PolicyFlags))
    slices = slice_options(options_of(args, SliceFlags))
    states = state_options(options_of(args, StateFlags))
    shape, mesh, numerics = model_shape(args), mesh_of(args), numerics_of(args)
    measured, ranks = measured_cost(args, shape), cluster(args)
    cost = measured or known_cost(args, shape, numerics)
    cost = with_second_forward(cost, numerics.recompute == FULL, numerics.loss_tokens is not None)
    if numerics.measures_logits:
        cost = with_score_products(cost, numerics.recompute == FULL)
    setup = Setup(
        shape=shape,
        mesh=mesh,
        numerics=numerics,
        cluster=ranks,
        cost=with_expert_exchange(cost, mesh, ranks, numerics.recompute),
        sequences=sequences_of(args, slices),
        budget=budget_of(args, policy, shape),
        slicing=AUTO if slices.slices == AUTO else slices.slicing,
        policy=policy.policy,
        states=states_of(args, states, mesh),
        planning=Planning(args.hdp_balance or AUTO, args.hdp_static_width),
        measured=measured is not None,
    )
    if setup.plans_offload:
        check_planned_offload(setup, policy)
    return with_slices(setup, slices)


def known_cost(args: Any, shape: ModelShape, numerics: Numerics) -> ModelCost:
    """Return the costs of the model on a known device, for a training without ``--cost-file``."""
    dtype = str(args.params_dtype).removeprefix("torch.")
    return scaled_device_cost(shape, args.tensor_model_parallel_size, dtype, numerics.operators)


def with_slices(setup: Setup, options: SliceOptions) -> Setup:
    """Return a setup with sliced micro-batches: slice lengths for samples, or the number of kept keys for documents."""
    if not setup.sequences.are_documents:
        lengths = sample_slice_lengths(setup, options) if options.is_on else ()
        return replace(setup, sequences=replace(setup.sequences, sample_slices=lengths))
    if options.slices in (AUTO, 1):
        return setup
    kept = affordable_keys(setup, options.slicing) if options.kept_keys is None else options.kept_keys
    return replace(setup, slicing=replace(options.slicing, kept_tokens=kept))


def mesh_of(args: Any) -> Mesh:
    """Return the distribution of the model over devices."""
    return Mesh(
        stage_layers=stage_layers(args),
        tensor_parallel=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        virtual_stages=args.virtual_pipeline_model_parallel_size or 1,
        expert_parallel=args.expert_model_parallel_size if args.num_experts else 1,
        expert_tensor_parallel=args.expert_tensor_parallel_size if args.num_experts else None,
        shares_optimizer=args.use_distributed_optimizer
        or getattr(args, "use_layer_wise_distributed_optimizer", False),  # Muon and Lion
        devices_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or None,
        stages_before_ranks=args.use_tp_pp_dp_mapping,
    )


def numerics_of(args: Any) -> Numerics:
    """Return the numerical settings of layers."""
    element, recompute = args.params_dtype.itemsize, args.recompute_granularity or NO_RECOMPUTE
    if recompute == "full" and args.recompute_method == "block":
        recompute = "block"
    return Numerics(
        element_bytes=element,
        operators=operators_of(args, args.distributed_backend == "nccl", element),
        loss_tokens=args.chunked_cross_entropy,
        rows=options_of(args, Fp8Options).rows,
        recompute=recompute,
        recomputed_layers=args.recompute_num_layers or 0 if recompute == "block" else 0,
        sum_bytes=max(FLOAT_BYTES, element),
        measures_logits=any(getattr(args, name, False) for name in LOGIT_FLAGS),
        counts_documents=bool(args.num_experts and "seq_aux_loss" in options_of(args, Balancing).ways),
    )


def sequences_of(args: Any, slices: SliceOptions) -> Sequences:
    """Return the sequences of a step."""
    partition = slices.partition if isinstance(slices.partition, str) else "time"
    if not args.hybrid_data_parallel:
        count = int(args.global_batch_size or 1) // (args.micro_batch_size * args.data_parallel_size)
        return Sequences(args.seq_length, max(1, count), are_documents=False, partition=partition)
    documents = args.global_batch_size or 1
    tokens = args.hdp_global_tokens or documents * args.seq_length  # assumes the longest documents
    ranks = cluster(args)
    count = -(-int(tokens) // (ranks.num_ranks * ranks.tokens_per_rank))
    return Sequences(args.seq_length, max(1, count), partition=partition)


def budget_of(args: Any, options: PolicyOptions, shape: ModelShape) -> Budget:
    """Return one process's memory and link speed. Raises ValueError if more host memory is requested than is free."""
    optimizer = optimizer_host_bytes(args, shape) / 1e9
    free = max(0.0, free_host_bytes() / 1e9 / local_processes() - optimizer)
    host = options.host_gb or 0.0
    if host > free and not args.fake_process_group:  # a dry run plans for another machine
        note = f" after {optimizer:.4g} GB for the optimizer (--optimizer-cpu-offload)" if optimizer else ""
        raise ValueError(
            f"--host-memory-gb {host:g} exceeds the free host memory: {free:.4g} GB for each of {local_processes()} "
            f"processes of this machine{note}; give at most that"
        )
    link = LINK_BYTES_PER_SECOND if options.link_gb is None else options.link_gb * 1e9
    return Budget(
        device_bytes=math.inf if options.device_gb is None else options.device_gb * 1e9,
        host_bytes=host * 1e9,
        disk_bytes=(args.state_nvme_gb or 0.0) * 1e9,
        link_bytes_per_second=link,
    )


def states_of(args: Any, options: StateOptions, mesh: Mesh) -> States:
    """Return the model states."""
    states = States(
        option=options.option,
        allowed=allowed_stages(
            options_of(args, DeviceFlags), args.distributed_backend == "nccl", args.params_dtype.itemsize
        ),
        page_bytes=options.page_bytes,
        update_steps=options.update_steps,
        has_disk=options.nvme is not None,
        ties_embeddings=not args.untie_embeddings_and_output_weights,
        embedding_in_host="embedding" in args.host_tables,
        added_parameters=ngram_parameters(args, mesh),
        sizes=state_sizes_of(args, args.distributed_backend == "nccl"),
        shares_node=not getattr(args, "deterministic_mode", False)
        and getattr(args, "num_distributed_optimizer_instances", 1) == 1,
        offloaded_share=args.optimizer_offload_fraction if getattr(args, "optimizer_cpu_offload", False) else 0.0,
    )
    if args.distributed_backend == "nccl":
        return states
    # On a CPU rank the processor also updates resident states and copies pages itself.
    speeds = replace(states.speeds, in_host=IN_HOST)
    return replace(states, speeds=speeds, update_bytes_per_second=ADAM_BYTES_PER_SECOND)


def ngram_parameters(args: Any, mesh: Mesh) -> tuple[float, ...]:
    """Return the number of n-gram memory parameters on the device, for each stage."""
    tables = options_of(args, TableOptions).ngram()
    if tables is None:
        return ()
    each = tables.num_parameters(args.hidden_size)
    return tuple(float(count * each) for count in memories_of_stages(tables.layers, mesh.stage_layers))


def optimizer_host_bytes(args: Any, shape: ModelShape) -> float:
    """Return the host memory of Megatron's optimizer per process: a copy, two moments and a gradient each."""
    if not getattr(args, "optimizer_cpu_offload", False):
        return 0.0
    parameters = num_parameters(shape, args.tensor_model_parallel_size)
    parameters /= args.pipeline_model_parallel_size * (args.data_parallel_size if args.use_distributed_optimizer else 1)
    return float(OFFLOADED_PARAMETER_BYTES * args.optimizer_offload_fraction * parameters)
