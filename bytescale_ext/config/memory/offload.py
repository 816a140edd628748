"""Selective offloading by the HDP plan (ByteScale section 5.2, Eq. 3): a share for each micro-batch.

Device memory holds the activations of C tokens. A micro-batch of more tokens moves the rest to host memory, up to the
limits of host memory and of what can be copied while the layers compute. A long sequence then needs fewer ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bytescale_ext.config.hdp import HdpConfig
from bytescale_ext.plan.activation.load import RESIDENT_LAYERS, LayerLoad, Machine
from bytescale_ext.plan.activation.offload import OffloadLimits
from bytescale_ext.plan.activation.policies import in_gigabytes, least_budget
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.hdp.problem import min_widths

_CHECKED_LENGTHS = 100_000


@dataclass(frozen=True)
class PlannedOffload:
    """The limits within which HDP plans offload activations.

    Attributes:
        limits: of Eq. 3; the planner shares ``host_bytes`` among as many micro-batches as there are pipeline stages.
        cost: of one pipeline stage in seconds, which Eq. 3 compares with the time of copies.
        hdp: settings of the planner.
    """

    limits: OffloadLimits
    cost: StageCost
    hdp: HdpConfig

    def min_ranks(self, lengths: Sequence[int]) -> list[int]:
        """Return D(s), the fewest ranks of each sequence. Raises ValueError where all ranks cannot hold one."""
        hdp = self.hdp
        limits = replace(self.limits, host_bytes=self.limits.host_bytes / hdp.num_stages)
        sizes = np.array(lengths, dtype=np.int64)
        widths = min_widths(sizes, hdp.cluster, hdp.rows_multiple, limits, self.cost.forward)
        return [int(width) for width in widths]

    def with_host_bytes(self, host_bytes: float) -> PlannedOffload:
        """Return these limits with another host memory."""
        return replace(self, limits=replace(self.limits, host_bytes=host_bytes))

    def problem(self) -> str | None:
        """Return a message about the first sequence length, up to the longest, that does not fit; None if all fit."""
        longest = self.hdp.longest_sequence
        try:
            self.min_ranks([*range(1, longest, -(-longest // _CHECKED_LENGTHS)), longest])
        except ValueError as error:
            return str(error).split(" has ", 1)[-1]
        return None

    def described(self) -> str:
        """Return one line about what offloading does for the longest sequence."""
        length, capacity = self.hdp.longest_sequence, self.hdp.cluster.tokens_per_rank
        ranks = self.min_ranks([length])[0]
        share = float(self.limits.min_shares(np.array([-(-length / ranks)]), capacity)[0])
        return (
            f"> bytescale: activations offload, by the plan: a sequence of {length} tokens needs {ranks} ranks instead "
            f"of {-(-length // capacity)}, with a share of {share:.3f} of its activations in host memory"
        )


def planned_offload(hdp: HdpConfig, machine: Machine, cost: ModelCost, load: LayerLoad) -> PlannedOffload:
    """Return the limits of a run.

    Args:
        hdp: settings of the planner.
        machine: host memory and link of a process.
        cost: of the model in seconds, measured or estimated from rates.
        load: a micro-batch of the run, for bytes of a layer, layers of a process and micro-batches in flight.

    Raises:
        ValueError: a sequence of at most ``--seq-length`` tokens does not fit; the message names a sufficient budget.
    """
    # Pipelines keep no layer resident, so the same share takes proportionally more host memory.
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
    remedy = "raising --host-memory-gb does not help, because the link is too slow to carry more"
    if needed is not None:
        remedy = f"or give --host-memory-gb {in_gigabytes(needed / per_byte)}"
    raise ValueError(f"--seq-length {hdp.longest_sequence}: a sequence of {problem}; {remedy}")
