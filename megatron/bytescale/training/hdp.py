"""Training on documents: the forward step, the data provider and the model's configuration, as Megatron wants them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import unwrap_model
from megatron.training import get_args
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.training import get_train_valid_test_num_samples, update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import get_blend_and_blend_per_split, print_rank_0

from bytescale_ext.attention.kernels import choose_kernel, counting, named_kernel
from bytescale_ext.config import HdpConfig
from bytescale_ext.cost_file import check_same_model, read_cost
from bytescale_ext.data.lengths import check_indexed_dataset, check_token_ids
from bytescale_ext.data.loader import StepLoader, StepsAhead
from bytescale_ext.data.packed import PackedMicroBatch
from bytescale_ext.data.planning import PlannerInProcess
from bytescale_ext.data.remote import checked_plan
from bytescale_ext.data.remote_loader import RemoteSplit, RemoteStepLoader
from bytescale_ext.metrics import StepClock
from bytescale_ext.plan.check import check_step_plan
from bytescale_ext.plan.cost import StageCost, flops_stage_cost
from bytescale_ext.plan.seq1f1b import slice_group_size
from bytescale_ext.plan.shapes import MicroBatch
from megatron.bytescale.core.datasets.document_dataset import SampleSource, build_document_datasets, check_splits
from megatron.bytescale.core.datasets.remote import check_line_file, open_remote, start_remote
from megatron.bytescale.core.models.gpt.gpt_layer_specs import document_layer_spec, use_document_positions
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.core.parallel_state import create_ring_comm, create_stage_links, hdp_rank
from megatron.bytescale.core.pipeline_parallel.schedules import wrap_finalize_model_grads
from megatron.bytescale.core.pipeline_parallel.seq1f1b import check_schedules
from megatron.bytescale.core.transformer.moe.router import padding_mask
from megatron.bytescale.runtime import HdpRuntime, model_shape
from megatron.bytescale.training import seq1f1b
from megatron.bytescale.training.activations import PlannedOffload
from megatron.bytescale.training.arguments import refusals_of_megatron
from megatron.bytescale.training.stock import data_settings


def model_config(args: Any, runtime: HdpRuntime) -> GPTModelConfig:
    """Megatron's GPT configuration with document attention, positions and the gradient hook."""
    with refusals_of_megatron():
        config = gpt_config_from_args(args)
    config.transformer_layer_spec = document_layer_spec(runtime)
    config.pre_wrap_hooks.append(partial(_prepare_model, runtime))
    if runtime.slice_rule is not None:
        config.transformer.microbatch_group_size_per_vp_stage = slice_group_size(
            runtime.config.num_stages, runtime.slice_rule.num_slices
        )
    config.transformer.finalize_model_grads_func = wrap_finalize_model_grads(finalize_model_grads, runtime)
    return config


def _prepare_model(runtime: HdpRuntime, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Runs once, on every process, between the building of the model and its wrapping in DDP."""
    args = get_args()
    kernel, reason, _ = choose_kernel(runtime.device, args.params_dtype, args.kv_channels, runtime.config.kernel)
    print_rank_0(f"> bytescale: attention kernel {kernel.name} ({reason})")
    runtime.kernel, runtime.kernel_calls = counting(kernel)
    runtime.comm = create_ring_comm(runtime.device, args.distributed_timeout_minutes)
    if runtime.config.eager:
        runtime.links = create_stage_links(args.distributed_timeout_minutes)
    note = seq1f1b.one_stage_note(runtime.config.num_stages) if runtime.config.num_slices > 1 else None
    if note is not None:
        print_rank_0(f"> bytescale: {note}")
    if runtime.slice_rule is not None:
        kept = runtime.slice_rule.kept_tokens
        print_rank_0(f"> bytescale: {seq1f1b.kept_note(args, runtime.config, kept, model_shape(args))}")
    return use_document_positions(model_chunks)


def dataset_provider(runtime: HdpRuntime) -> Callable[..., Any]:
    """``train_valid_test_datasets_provider``: one loader of whole steps for each split."""

    def provide(num_samples: Any, vp_stage: int | None = None) -> tuple[StepsAhead | None, ...]:
        if vp_stage:  # the step that the first chunk's loader gives is that of all chunks
            return None, None, None
        args = get_args()
        sources: Sequence[SampleSource | RemoteSplit | None]
        if runtime.remote is None:
            config = BlendedMegatronDatasetConfig(**data_settings(args))
            sources = build_document_datasets(config, num_samples, lambda: True)
        else:
            multiple, seconds = runtime.config.rows_multiple, runtime.config.plan_seconds
            layers = runtime.offload_layers
            make_plan = partial(checked_plan, runtime.planner(), multiple, seconds, num_layers=layers)
            sources = start_remote(runtime.remote, data_settings(args), num_samples, make_plan)
        batch = args.global_batch_size
        eval_batch = args.eval_global_batch_size or batch
        places = ((args.consumed_train_samples, batch), (args.consumed_valid_samples, eval_batch), (0, eval_batch))
        loaders: list[StepsAhead | None] = []
        for source, (consumed, size), cyclic in zip(sources, places, (False, True, True), strict=True):
            first_step = 0 if cyclic else args.iteration
            wanted = source is not None
            loaders.append(step_loader(runtime, args, source, consumed, size, cyclic, first_step) if wanted else None)
        return tuple(loaders)

    provide.is_distributed = True  # type: ignore[attr-defined]  # every rank reads its own token ranges
    return provide


def step_loader(
    runtime: HdpRuntime, args: Any, source: Any, consumed: int, batch: int, cyclic: bool, first_step: int
) -> StepsAhead:
    """The loader of one split, started after ``consumed`` samples and ``first_step`` steps."""
    multiple = runtime.config.rows_multiple
    if isinstance(source, RemoteSplit):
        is_end = parallel_state.is_pipeline_first_stage(ignore_virtual=True) or parallel_state.is_pipeline_last_stage(
            ignore_virtual=True
        )
        return RemoteStepLoader(
            source,
            runtime.planner(),
            args.rank,
            hdp_rank(),
            consumed_samples=consumed,
            samples_per_step=batch,
            rows_multiple=multiple,
            plan_ahead=runtime.config.plan_ahead,
            vocab_size=args.padded_vocab_size,
            cyclic=cyclic,
            pin_memory=runtime.clock.on_cuda,
            first_step=first_step,
            reads_tokens=is_end,
            slice_rule=runtime.slice_rule,
        )
    return StepLoader(
        source,
        PlannerInProcess(runtime.planner()),
        hdp_rank(),
        consumed_samples=consumed,
        samples_per_step=batch,
        rows_multiple=multiple,
        plan_ahead=runtime.config.plan_ahead,
        check=partial(check_step_plan, tokens_multiple=multiple, num_layers=runtime.offload_layers),
        vocab_size=args.padded_vocab_size,
        cyclic=cyclic,
        pin_memory=runtime.clock.on_cuda,
        first_step=first_step,
        plan_seconds=runtime.config.plan_seconds,
        slice_rule=runtime.slice_rule,
    )


def forward_step(runtime: HdpRuntime) -> Callable[..., Any]:
    """``forward_step_func``: one micro-batch of documents through the model, or through one stage's chunk of it.

    Or one slice of a micro-batch, which comes with the prefix that its layers share.
    """

    def forward(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        index, packed, prefix = next(data_iterator)
        step = runtime.step
        assert step is not None, f"{step=}"
        chunk = unwrap_model(model)
        if model.training:
            runtime.clock.mark("forward", index)
            if not chunk.vp_stage and (prefix is None or not packed.layout.index):
                # Each micro-batch once on each stage, which is what Megatron's counter divides by.
                count_sequences(step.plan.ranks[runtime.rank], index, step.lengths, runtime.rank)
        packed = packed.to(runtime.device)
        output = model(
            packed.tokens[None] if chunk.pre_process else None,
            packed.positions[None],
            None,
            labels=packed.labels[None] if chunk.post_process else None,
            packed_seq_params=DocumentSeqParams(positions=packed.positions, layout=packed.layout, prefix=prefix),
            padding_mask=padding_mask(packed, model),
        )
        if model.training and output.requires_grad:
            output.register_hook(lambda _: runtime.clock.mark("backward", index))
        return output, partial(sum_of_losses, runtime, packed)

    return forward


def count_sequences(mine: Sequence[MicroBatch], index: int, lengths: tuple[int, ...], rank: int) -> None:
    """Tell Megatron's FLOP counter the true lengths: each sequence once, by the first rank of its ring.

    ``mine``: this rank's micro-batches, beyond which ``index`` is padding.
    """
    shards = mine[index].shards if index < len(mine) else ()
    counted = [lengths[shard.seq] for shard in shards if shard.ring[0] == rank]
    bounds = torch.tensor([0, 0, *counted], dtype=torch.float64).cumsum(0)
    update_seqlen_stats_from_cu_seqlens(bounds)


def sum_of_losses(
    runtime: HdpRuntime, packed: PackedMicroBatch, losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """(sum of the losses, number of labels, report) of one micro-batch; Megatron divides by all ranks' labels."""
    total = torch.sum(losses.view(-1).float() * packed.loss_mask)
    num_labels = packed.loss_mask.sum().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        documents = runtime.documents()
        for test in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=total,
                rejection_func=test,
                message=f"{test.__name__[2:]} loss in the documents {documents}",
                tolerance=0.0,
                fatal=True,
            )
    return total, num_labels, {"lm loss": torch.stack([total.detach(), num_labels.to(total.dtype)])}


def create_runtime(args: Any, config: HdpConfig, offload: PlannedOffload | None = None) -> HdpRuntime:
    """The state that hooks and patches will share in this process. ``offload``: what plans may move to host memory.

    Raises ValueError for an unfit kernel name or cost file, and for slices that cannot be.
    """
    on_cuda = args.distributed_backend == "nccl"
    if config.kernel is not None:
        named_kernel("cuda" if on_cuda else "cpu", args.params_dtype, args.kv_channels, config.kernel)
    remote = None
    if config.remote is not None:
        remote = open_remote(args, config.remote, data_settings(args), wanted_samples(args))
    cost = stage_cost(args, config) if offload is None else offload.cost
    limits = None if offload is None else offload.limits
    rule = None
    if config.num_slices > 1:
        check_schedules()
        rule = seq1f1b.document_slice_rule(args, config, cost, model_shape(args))
    return HdpRuntime(config, cost, StepClock(on_cuda), slice_rule=rule, remote=remote, offload=limits)


def stage_cost(args: Any, config: HdpConfig) -> StageCost:
    """What the planner balances: seconds by ``--hdp-cost``, else FLOPs, of the largest pipeline stage.

    Raises ValueError for a cost file that is damaged or of another model.
    """
    shape = model_shape(args)
    if config.cost_file is None:
        return flops_stage_cost(shape, config.num_stages)
    dtype = str(args.params_dtype).removeprefix("torch.")
    measured = check_same_model(
        read_cost(config.cost_file), shape, args.tensor_model_parallel_size, dtype, config.cost_file
    )
    return measured.stage(-(-shape.num_layers // config.num_stages), has_head=True)


def wanted_samples(args: Any) -> tuple[int | None, ...]:
    """Samples of the three splits, as far as they are known before Megatron has counted iterations."""
    if args.train_iters is None:
        return args.train_samples, args.eval_iters, args.eval_iters
    sizes: tuple[int | None, ...] = get_train_valid_test_num_samples()
    return sizes


def check_data(args: Any) -> None:
    """Refuse data sets that are missing, truncated, foreign, empty or of another vocabulary. Raises ValueError.

    Reads the index of each; token ids are scanned by the first process only. Call it after ``parse``.
    """
    with refusals_of_megatron():
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    blends = [blend] if blend_per_split is None else [part for part in blend_per_split if part is not None]
    prefixes = [prefix for part in blends if part is not None for prefix in part[0]]
    if not prefixes:
        raise ValueError("no data: give --data-path PREFIX (`bytescale corpus` makes one)")
    is_remote = args.hdp_loader == "ray"
    for prefix in prefixes:
        if is_remote:
            check_line_file(prefix)
            continue
        check_indexed_dataset(prefix)
        if args.rank == 0:
            check_token_ids(prefix, args.padded_vocab_size)
    with refusals_of_megatron():
        config = BlendedMegatronDatasetConfig(**data_settings(args))
    parts = config.blend_per_split if config.blend is None else config.split_matrix
    for name, wanted, part in (("train", not args.skip_train, parts[0]), ("valid", args.eval_iters > 0, parts[1])):
        if wanted and part is None:  # Megatron would train on nothing, or evaluate without a data iterator
            raise ValueError(
                f"no documents for the {name} split: give another --split (it is {args.split}) or "
                f"--{name}-data-path{', or --eval-iters 0' if name == 'valid' else ''}"
            )
    if not is_remote:  # its documents are counted in ``open_remote``
        check_splits(config, wanted_samples(args))
