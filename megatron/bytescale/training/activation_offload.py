"""``--activation-policy offload`` with hybrid data parallelism: the plan names the share of each micro-batch.

ByteScale's selective offloading (section 5.2, Eq. 3): C stays what device memory holds, and a micro-batch of more
tokens moves the share of its activations that does not fit to host memory, as far as copying hides behind computing
and host memory reaches. So a long sequence needs fewer ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bytescale_ext.config import HdpConfig
from bytescale_ext.plan.activation import RESIDENT_LAYERS, LayerLoad, Machine
from bytescale_ext.plan.activation_policy import in_gigabytes, least_budget
from bytescale_ext.plan.cost import ModelCost, OffloadLimits, StageCost
from bytescale_ext.plan.hdp import least_widths
from megatron.bytescale.training import seq1f1b

_CHECKED_LENGTHS = 100_000


@dataclass(frozen=True)
class PlannedOffload:
    """What the HDP planner offloads within.

    Attributes:
        limits: of Eq. 3; the planner shares ``host_bytes`` among as many micro-batches as there are pipeline stages.
        cost: of one pipeline stage in seconds, which Eq. 3 compares with the time of copies.
        hdp: whose plans these are.
    """

    limits: OffloadLimits
    cost: StageCost
    hdp: HdpConfig

    def least_ranks(self, lengths: Sequence[int]) -> list[int]:
        """The fewest ranks of each sequence, D(s). Raises ValueError where all ranks together do not hold one."""
        hdp = self.hdp
        limits = replace(self.limits, host_bytes=self.limits.host_bytes / hdp.num_stages)
        sizes = np.array(lengths, dtype=np.int64)
        widths = least_widths(sizes, hdp.num_ranks, hdp.tokens_per_rank, hdp.rows_multiple, limits, self.cost.forward)
        return [int(width) for width in widths]

    def with_host_bytes(self, host_bytes: float) -> PlannedOffload:
        """The same with another budget."""
        return replace(self, limits=replace(self.limits, host_bytes=host_bytes))

    def problem(self) -> str | None:
        """What does not fit of sequences up to the longest, in words, or None."""
        longest = self.hdp.longest_sequence
        try:
            self.least_ranks([*range(1, longest, -(-longest // _CHECKED_LENGTHS)), longest])
        except ValueError as error:
            return str(error).split(" has ", 1)[-1]
        return None

    def described(self) -> str:
        """What offloading does for the longest sequence, in one line."""
        length, capacity = self.hdp.longest_sequence, self.hdp.tokens_per_rank
        ranks = self.least_ranks([length])[0]
        share = float(self.limits.least_shares(np.array([-(-length / ranks)]), capacity)[0])
        return (
            f"> bytescale: activations offload, by the plan: a sequence of {length} tokens needs {ranks} ranks instead "
            f"of {-(-length // capacity)}, with a share of {share:.3f} of its activations in host memory"
        )


def plans_offload(args: argparse.Namespace) -> bool:
    """Whether the HDP plan names the shares: the policy is offload and no share is given."""
    return bool(args.hybrid_data_parallel and args.activation_policy == "offload" and args.swap_fraction is None)


def planned_offload(
    args: argparse.Namespace, hdp: HdpConfig, machine: Machine, cost: ModelCost, load: LayerLoad
) -> PlannedOffload:
    """The limits of a run.

    Args:
        args: what Megatron has checked.
        hdp: whose plan names the shares.
        machine: host memory and link of a process.
        cost: of the model in seconds, measured or by rates.
        load: a micro-batch of the run, for bytes of a layer, layers of a process and micro-batches in flight.

    Raises:
        ValueError: where Eq. 3 does not say what fits, or a sequence of at most ``--seq-length`` tokens does not fit.
    """
    policy = "--activation-policy offload by the plan of --hybrid-data-parallel"
    by_share = "or give --swap-fraction, the same share for all micro-batches"
    if args.device_memory_gb is not None:
        raise ValueError(f"{policy}: --hdp-tokens-per-rank says what the device holds; remove --device-memory-gb")
    if hdp.static_width is not None:
        raise ValueError(
            f"{policy} does not work with --hdp-static-width, whose widths are fixed: remove it, {by_share}"
        )
    if args.num_experts:
        raise ValueError(
            f"{policy} does not work with --num-experts: what experts save stays on the device, so a share of the rest "
            f"does not make room for more tokens; use priced, {by_share}"
        )
    if seq1f1b.is_on(args):
        raise ValueError(
            f"{policy} does not work with --seq1f1b-splits, which keep less by themselves; remove one, {by_share}"
        )
    if load.num_layers <= RESIDENT_LAYERS:
        raise ValueError(
            f"{policy} keeps {RESIDENT_LAYERS} layers of each process on the device, and a process has "
            f"{load.num_layers}: use fewer pipeline stages, {by_share}"
        )
    # Where more than RESIDENT_LAYERS layers are swapped, in pipelines, a share takes so much more host memory.
    swapped_layers = load.num_layers - min(load.resident_layers, load.num_layers)
    host_bytes = machine.host_bytes * (load.num_layers - RESIDENT_LAYERS) / swapped_layers
    limits = OffloadLimits(
        num_layers=load.num_layers,
        layer_bytes_per_token=max(cost.layer_bytes, load.bytes_of() / load.num_tokens),
        bytes_per_second=machine.link_bytes_per_second,
        host_bytes=host_bytes * hdp.num_stages / load.in_flight,
    )
    planned = PlannedOffload(limits, cost.stage(load.num_layers, has_head=True), hdp)
    problem = planned.problem()
    if problem is None:
        return planned
    per_byte = limits.host_bytes / machine.host_bytes if machine.host_bytes else 1.0
    everything = hdp.longest_sequence * limits.layer_bytes_per_token * limits.num_layers
    needed = least_budget(lambda size: planned.with_host_bytes(size).problem() is None, everything * hdp.num_stages)
    remedy = "raising --host-memory-gb does not help, for the link is too slow to carry more"
    if needed is not None:
        remedy = f"or give --host-memory-gb {in_gigabytes(needed / per_byte)}"
    raise ValueError(f"--seq-length {hdp.longest_sequence}: a sequence of {problem}; {remedy}")
