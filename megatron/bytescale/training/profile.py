"""Times micro-batches in Megatron's real model for ``bytescale profile``: the same code as training, without steps.

Several HDP ranks measure at the same time, because they share memory, clock and bus in a training step as well.

The training command is used unchanged. Arguments that do not affect a layer's time (data, checkpoints, pipeline stages,
the number of layers) are overridden. All other arguments apply, including recomputation.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

from bytescale_ext.attention.kernels.contract import accumulation_dtype
from bytescale_ext.data.loading.step import StepBatch
from bytescale_ext.data.samples.packed import PackedMicroBatch
from bytescale_ext.data.samples.units import units_of
from bytescale_ext.measure.fit import LAYERS, Ring, Timing
from bytescale_ext.measure.metrics import Mark, StepClock
from bytescale_ext.measure.ring_blocks import Attention, block_seconds
from bytescale_ext.measure.speeds import Timer
from bytescale_ext.plan.cost.model_shape import ModelShape, ring_bytes_per_token
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges
from bytescale_ext.plan.step.plan import StepPlan
from bytescale_ext.plan.step.sizes import Cluster
from megatron.bytescale import features
from megatron.bytescale.arguments.parse import parse
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.features.hdp import build as hdp
from megatron.bytescale.runtime import Parts, Runtime
from megatron.bytescale.training.initialize import use_gpu
from megatron.bytescale.training.pretrain_arguments import pretrain_config, stock_training

if TYPE_CHECKING:
    from megatron.core.transformer.module import MegatronModule

OVERRIDDEN_ARGUMENTS = {
    "sft": False, "hybrid_data_parallel": True, "lr": 1.0, "min_lr": 0.0, "cost_file": None, "global_batch_size": 1,
    "train_iters": 1,
    "train_samples": None, "eval_iters": 0, "eval_global_batch_size": None, "lr_decay_iters": None,
    "lr_decay_samples": None, "lr_warmup_iters": 0, "lr_warmup_samples": 0, "lr_warmup_fraction": None,
    "lr_warmup_init": 0.0, "lr_wsd_decay_iters": None, "lr_wsd_decay_samples": None, "save": None, "load": None,
    "tensorboard_dir": None, "wandb_project": "", "wandb_exp_name": None, "wandb_save_dir": None, "wandb_entity": None,
    "pipeline_model_parallel_size": 1, "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None, "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None, "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False, "account_for_loss_in_pipeline_split": False,
    "expert_model_parallel_size": 1, "moe_layer_freq": 1, "overlap_grad_reduce": False,
    "overlap_param_gather": False, "use_distributed_optimizer": False, "check_for_nan_in_loss_and_grad": False,
    "window_size": None, "window_attn_skip_freq": None, "no_rope_freq": None, "qk_clip": False,
    "log_max_attention_logit": False, "qk_clip_alpha": 0.5, "qk_clip_threshold": 100,
}  # fmt: skip
"""Arguments of a training command that the profile overrides: they cost no time in layers, or only once per step.

All layers are measured with full attention and RoPE, so a cost file describes a model without windows. ``CostModel``
derives the time of windows from the time of full attention. Each rank has all experts of the measured layer, so no
tokens are exchanged. Every setup adds the time of exchanges (``plan/setup/costs.py``) and of largest logits.
"""


@dataclass(frozen=True)
class Subject:
    """The subject of a profile: Megatron's arguments, the runtime, and the model's sizes as the user gave them."""

    args: argparse.Namespace
    runtime: Runtime
    shape: ModelShape

    @property
    def cluster(self) -> Cluster:
        """The ranks of the measurement."""
        return self.runtime.run.cluster

    @property
    def tensor_parallel(self) -> int:
        """The number of ranks that share each layer."""
        return int(self.args.tensor_model_parallel_size)

    @property
    def has_processor_time(self) -> bool:
        """Whether processor time measures a rank's work: on CPU, in one thread, without tensor parallelism."""
        return not self.runtime.parts.clock.on_cuda and torch.get_num_threads() == 1 and self.tensor_parallel == 1

    @property
    def dtype(self) -> str:
        """Parameter dtype, as named in cost files."""
        return str(self.args.params_dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        """Name of the hardware."""
        return torch.cuda.get_device_name() if self.runtime.parts.clock.on_cuda else f"CPU ({platform.machine()})"

    def ring_seconds(self, bytes_per_second: float) -> tuple[float, float]:
        """Return forward and backward seconds per layer for each token whose keys and values a rank receives."""
        dtype = self.args.params_dtype
        sizes = (dtype.itemsize, accumulation_dtype(dtype).itemsize)
        forward, backward = ring_bytes_per_token(self.shape, self.tensor_parallel, *sizes)
        return forward / bytes_per_second, backward / bytes_per_second


class RandomTokens:
    """A ``TokenSource`` of synthetic documents; a micro-batch's cost does not depend on its token ids."""

    def __init__(self, lengths: Sequence[int], vocab_size: int) -> None:
        self._lengths = tuple(lengths)
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return len(self._lengths)

    def length(self, sample_id: int) -> int:
        """Return the number of tokens of a document."""
        return self._lengths[sample_id]

    def read(self, sample_id: int, start: int, stop: int) -> np.ndarray:
        """Return tokens [stop - start] of a document; repeated reads are equal."""
        tokens = np.random.default_rng(sample_id).integers(0, self._vocab_size, self._lengths[sample_id])
        return tokens[start:stop]

    def describe(self, sample_id: int) -> str:
        """Return a document's name for messages."""
        return f"made-up document {sample_id}"


def prepare(flags: Sequence[str], max_tokens: int, on_cpu: bool) -> Subject:
    """Parse a training command, join the process group and set up Megatron. Call it once per process.

    With tensor parallelism, ``torchrun`` starts one process per tensor-parallel rank, or a multiple to profile several
    HDP ranks.

    Raises:
        ValueError: a flag cannot be profiled, or the number of processes does not match it.
    """
    args = parse(["bytescale profile", *flags], on_cpu, partial(_settle, max_tokens=max_tokens))
    _join(args, on_cpu)
    run = resolve(args)
    subject = Subject(args, Runtime(run, Parts(StepClock(run.process.on_cuda, time.process_time))), run.shape)
    expert_ranks = args.expert_tensor_parallel_size if args.num_experts else None
    parallel_state.initialize_model_parallel(subject.tensor_parallel, expert_tensor_parallel_size=expert_ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(args.seed)
    return subject


def _settle(args: argparse.Namespace, max_tokens: int) -> None:
    """Override arguments that do not affect a profile. Raises ValueError for arguments that it cannot measure."""
    every = args.moe_layer_freq
    if args.num_experts and not all(every if isinstance(every, list) else [every == 1]):
        raise ValueError("--moe-layer-freq: layers differ in their cost; profile with 1, or train without --cost-file")
    if args.recompute_granularity == "full":  # every plan adds the second forward pass itself
        args.recompute_granularity = args.recompute_method = args.recompute_num_layers = None
    needed = args.tensor_model_parallel_size
    if args.world_size % needed:
        raise ValueError(
            f"--tensor-model-parallel-size {needed} needs {needed} processes, or a multiple, and there are "
            f"{args.world_size}: torchrun --nproc-per-node {needed} --no-python bytescale profile ..."
        )
    ours = {action.dest: action.default for feature in features.FEATURES for action in feature.actions()}
    vars(args).update(ours | OVERRIDDEN_ARGUMENTS | {"hdp_attention_kernel": args.hdp_attention_kernel})
    multiple = args.tensor_model_parallel_size if args.sequence_parallel else 1
    args.hdp_tokens_per_rank = max_tokens + -max_tokens % multiple
    args.global_batch_size = args.world_size // needed
    args.seq_length = args.hdp_tokens_per_rank
    args.max_position_embeddings = max(args.max_position_embeddings or 0, args.seq_length)
    args.lr = args.lr or 1e-4


def _join(args: argparse.Namespace, on_cpu: bool) -> None:
    """Join torchrun's processes, or create a group of one process."""
    if on_cpu:  # as torchrun does, so that processor time measures the work
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    else:
        use_gpu(args.local_rank)
    if dist.is_initialized():
        return
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group(args.distributed_backend)
    else:
        dist.init_process_group(args.distributed_backend, store=dist.HashStore(), rank=0, world_size=1)


def build_model(subject: Subject, num_layers: int) -> MegatronModule:
    """Build a model of ``num_layers`` layers, wrapped as for training, so that micro-batches accumulate gradients."""
    args = subject.args
    args.num_layers = num_layers
    config = hdp.use_document_model(stock_training(args), subject.runtime).model
    (model,) = config.get_builder_cls()(config).build_distributed_models(
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        ddp_config=pretrain_config(args, config).ddp,
    )
    model.train()
    return model


def profile_plan(packs: Sequence[Sequence[int]], rings: Sequence[Ring], cluster: Cluster) -> StepPlan:
    """Return a plan that gives every rank its own micro-batch of each pack and its share of each ring's sequences.

    Of each width, as many rings run at the same time as fit on the ranks.
    """
    lengths: list[int] = []
    ranks: list[list[MicroBatch]] = [[] for _ in range(cluster.num_ranks)]
    for sequences, width in rings:
        for first in range(0, cluster.num_ranks, width):
            ring = tuple(range(first, first + width))
            for place, rank in enumerate(ring):
                ranges_of_sequences = (zigzag_ranges(length, width, place) for length in sequences)
                shards = (Shard(len(lengths) + i, ranges, ring) for i, ranges in enumerate(ranges_of_sequences))
                ranks[rank].append(MicroBatch(tuple(shards)))
            lengths.extend(sequences)
    for pack in packs:
        for rank, micro_batches in enumerate(ranks):
            shards = (Shard(len(lengths) + i, ((0, length),), (rank,)) for i, length in enumerate(pack))
            micro_batches.append(MicroBatch(tuple(shards)))
            lengths.extend(pack)
    return StepPlan(cluster.num_ranks, cluster.tokens_per_rank, tuple(lengths), tuple(map(tuple, ranks)))


def begin_plan(subject: Subject, plan: StepPlan) -> tuple[PackedMicroBatch, ...]:
    """Make the plan the current step, with synthetic tokens; return this rank's micro-batches."""
    runtime = subject.runtime
    source = RandomTokens(plan.lengths, subject.shape.vocab)
    ids = tuple(range(len(plan.lengths)))
    units = units_of(plan.ranks[runtime.rank], plan.lengths, runtime.rank, runtime.hdp.rows_multiple, None)
    mine = tuple(unit.read(source, ids, plan.lengths) for unit in units)
    if runtime.parts.clock.on_cuda:  # the loader copies in the background
        mine = tuple(packed.pinned() for packed in mine)
    runtime.step.batch = StepBatch(0, ids, plan, mine)
    return mine


def run_micro_batch(runtime: Runtime, model: MegatronModule, packed: PackedMicroBatch) -> list[Mark]:
    """Run forward, loss and backward of one micro-batch; return marks at their bounds. Does not wait."""
    runtime.parts.clock.begin(traced=False)
    output, loss_of = hdp.forward_step(runtime)(iter([(0, packed, None)]), model)
    loss_of(output)[0].backward()
    runtime.parts.clock.mark("end")
    return list(runtime.parts.clock.marks)


def seconds_between(marks: Sequence[Mark], subject: Subject, by_wall: bool = False) -> tuple[float, float]:
    """Return forward and backward seconds of ``run_micro_batch``; on CUDA the device must be synchronised before.

    On CPU the result is this process's processor time if that measures its work, because other programs disturb it
    least. It includes the threads that carry messages, because they run on the rank's core. With ``by_wall`` the result
    is always wall time.
    """
    forward, backward, end = marks[-3:]
    if subject.runtime.parts.clock.on_cuda:
        return forward.stream_seconds(backward), backward.stream_seconds(end)
    name = "busy_seconds" if subject.has_processor_time and not by_wall else "wall_seconds"
    times = [getattr(mark, name) for mark in (forward, backward, end)]
    return times[1] - times[0], times[2] - times[1]


def time_packs(
    subject: Subject, packs: Sequence[Sequence[int]], repeats: int, rings: Sequence[Ring] = ()
) -> list[Timing]:
    """Return times of rings and of each pack in models of ``LAYERS`` layers.

    Each time is the median of ``repeats`` rounds after a warm-up round, which is what training sees; if several ranks
    share CPU cores, the minimum is up to 30 % lower. A round runs every case once, so that a slow moment of the machine
    does not affect only one pack. Collective; each time is the mean over all ranks. On CPU, the time of a ring is the
    processor time of its exchange, without waiting for neighbours.
    """
    runtime = subject.runtime
    models = [build_model(subject, num_layers) for num_layers in LAYERS]
    micro_batches = begin_plan(subject, profile_plan(packs, rings, subject.cluster))
    rounds = []
    for _ in range(repeats + 1):
        marks = [run_micro_batch(runtime, model, packed) for model in models for packed in micro_batches]
        if runtime.parts.clock.on_cuda:
            torch.cuda.synchronize()
        rounds.append([seconds_between(marks_of_pack, subject) for marks_of_pack in marks])
    runtime.step.batch = None
    everyones: list[np.ndarray | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, np.median(rounds[1:], axis=0))
    kinds = [*rings, *((tuple(pack), 1) for pack in packs)]
    named = [(num_layers, *kind) for num_layers in LAYERS for kind in kinds]
    return [
        Timing(num_layers, lengths, forward, backward, width)
        for (num_layers, lengths, width), (forward, backward) in zip(
            named, np.mean([times for times in everyones if times is not None], axis=0).tolist(), strict=True
        )
    ]


def time_blocks(subject: Subject, rings: Sequence[Ring]) -> list[tuple[float, float]]:
    """Return the forward and backward seconds that the blocks of each ring add to a layer on one rank.

    One HDP rank measures them with virtual ranks (``ring_blocks.py``). Collective; each time is the mean over the
    tensor-parallel ranks. ``time_packs`` must have built a model.
    """
    shape, ranks, parts = subject.shape, subject.tensor_parallel, subject.runtime.parts
    assert parts.kernel is not None
    heads = (shape.num_heads // ranks, max(1, shape.num_kv_heads // ranks), shape.head_dim)
    attention = Attention(parts.kernel, *heads, subject.args.params_dtype, subject.runtime.device)
    clock = time.process_time if subject.has_processor_time else time.perf_counter
    timer = partial(Timer, clock, torch.cuda.synchronize if parts.clock.on_cuda else (lambda: None))
    everyones: list[list[tuple[float, float]]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, [block_seconds(ring, attention, timer) for ring in rings])
    return [(forward, backward) for forward, backward in np.mean(everyones, axis=0).tolist()]


def kept_bytes_per_token(subject: Subject, num_tokens: int) -> tuple[float, float]:
    """Return a token's kept bytes in one layer for its backward pass, without and with full recomputation."""
    kept: dict[tuple[bool, int], int] = {}
    for num_layers in LAYERS:
        model = build_model(subject, num_layers)
        config = unwrap_model(model).config
        for full in (False, True):
            config.recompute_granularity = "full" if full else _partial_recompute(subject.args)
            config.recompute_method, config.recompute_num_layers = ("uniform", 1) if full else (None, None)
            plan = profile_plan([(num_tokens,)], (), subject.cluster)
            (packed,) = begin_plan(subject, plan)
            kept[full, num_layers] = _kept_bytes(subject.runtime, model, packed)
    subject.runtime.step.batch = None
    few, many = LAYERS
    tokens = num_tokens * (many - few)
    without, with_recompute = ((kept[full, many] - kept[full, few]) / tokens for full in (False, True))
    return without, with_recompute


def _partial_recompute(args: argparse.Namespace) -> str | None:
    return "selective" if args.recompute_granularity == "selective" else None


def _kept_bytes(runtime: Runtime, model: MegatronModule, packed: PackedMicroBatch) -> int:
    """Return the bytes of memory that a forward pass keeps for its backward pass."""
    runtime.parts.clock.begin(traced=False)

    def forward() -> object:
        return hdp.forward_step(runtime)(iter([(0, packed, None)]), model)

    if runtime.parts.clock.on_cuda:
        forward()  # libraries allocate their workspaces
        before = torch.cuda.memory_allocated()
        held = forward()
        return torch.cuda.memory_allocated() - before if held else 0
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        forward()
    module = unwrap_model(model)
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*module.parameters(), *module.buffers())}
    return sum(storage.nbytes() for pointer, storage in storages.items() if pointer not in weights)
