"""Selective offloading by the plan of a step (ByteScale section 5.2, Eq. 3): a share for each micro-batch.

Device memory stores the activations of C tokens. A micro-batch of more tokens moves the rest to host memory, up to the
limit of host memory and of copies that overlap with computation. A long sequence then needs fewer ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from bytescale_ext.plan.activation.load import RESIDENT_LAYERS
from bytescale_ext.plan.activation.offload import OffloadLimits
from bytescale_ext.plan.activation.policies import in_gigabytes, least_budget
from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.hdp.problem import min_widths
from bytescale_ext.plan.setup.policy import StagePolicy, stage_policy
from bytescale_ext.plan.setup.setup import Setup

_CHECKED_LENGTHS = 100_000


@dataclass(frozen=True)
class PlannedOffload:
    """Limits within which plans offload activations.

    Attributes:
        limits: limits of Eq. 3; as many micro-batches as pipeline stages share their ``host_bytes``.
        cost: seconds of one pipeline stage, which Eq. 3 compares with the time of copies.
        setup: setup of the run.
    """

    limits: OffloadLimits
    cost: StageCost
    setup: Setup

    def min_ranks(self, lengths: Sequence[int]) -> list[int]:
        """Return D(s), the fewest ranks of each sequence. Raises ValueError if a sequence does not fit on all ranks."""
        setup = self.setup
        limits = replace(self.limits, host_bytes=self.limits.host_bytes / setup.mesh.num_stages)
        sizes = np.array(lengths, dtype=np.int64)
        widths = min_widths(sizes, setup.cluster, setup.rows_multiple, limits, self.cost.forward)
        return [int(width) for width in widths]

    def with_host_bytes(self, host_bytes: float) -> PlannedOffload:
        """Return these limits with another host memory."""
        return replace(self, limits=replace(self.limits, host_bytes=host_bytes))

    def problem(self) -> str | None:
        """Return a message about the first sequence length, up to the longest, that does not fit; None if all fit."""
        longest = self.setup.sequences.longest
        try:
            self.min_ranks([*range(1, longest, -(-longest // _CHECKED_LENGTHS)), longest])
        except ValueError as error:
            return str(error).split(" has ", 1)[-1]
        return None

    def described(self) -> str:
        """Return one line about the effect of offloading on the longest sequence."""
        length, capacity = self.setup.sequences.longest, self.setup.cluster.tokens_per_rank
        ranks = self.min_ranks([length])[0]
        share = float(self.limits.min_shares(np.array([-(-length / ranks)]), capacity)[0])
        return (
            f"> bytescale: activations offload, by the plan: a sequence of {length} tokens needs {ranks} ranks instead "
            f"of {-(-length // capacity)}, with a share of {share:.3f} of its activations in host memory"
        )


def offloading_policy(setup: Setup) -> StagePolicy:
    """Return the policy of all stages. They offload the same share, which the stage with the most layers needs."""
    of_stage = stage_policy(setup, 0)
    return replace(of_stage, layers=replace(of_stage.layers, num_layers=max(setup.mesh.stage_layers)))


def planned_offload(setup: Setup) -> PlannedOffload:
    """Return the limits within which the plans of a setup offload activations.

    Raises:
        ValueError: a sequence of at most ``--seq-length`` tokens does not fit; the message names a sufficient budget.
    """
    load, budget, mesh = offloading_policy(setup).largest, setup.budget, setup.mesh
    # Pipelines keep no layer resident, so the same share takes proportionally more host memory.
    swapped_layers = load.num_layers - min(load.resident_layers, load.num_layers)
    host_bytes = budget.host_bytes * (load.num_layers - RESIDENT_LAYERS) / swapped_layers
    limits = OffloadLimits(
        num_layers=load.num_layers,
        layer_bytes_per_token=max(setup.cost.layer_bytes if setup.measured else 0.0, load.bytes_of() / load.num_tokens),
        bytes_per_second=budget.link_bytes_per_second,
        host_bytes=host_bytes * mesh.num_stages / load.in_flight,
    )
    cost = setup.cost.stage(load.num_layers, has_head=True).on(setup.cost.nodes(setup.cluster))
    planned = PlannedOffload(limits, cost, setup)
    problem = planned.problem()
    if problem is None:
        return planned
    longest = setup.sequences.longest
    per_byte = limits.host_bytes / budget.host_bytes if budget.host_bytes else 1.0
    everything = longest * limits.layer_bytes_per_token * limits.num_layers
    needed = least_budget(lambda size: planned.with_host_bytes(size).problem() is None, everything * mesh.num_stages)
    remedy = "raising --host-memory-gb does not help, because the link is too slow to carry more"
    if needed is not None:
        remedy = f"or give --host-memory-gb {in_gigabytes(needed / per_byte)}"
    raise ValueError(f"--seq-length {longest}: a sequence of {problem}; {remedy}")
