"""The scheduler of dynamic context parallelism in a source tree of Megatron, to run its plans.

The function that forms one micro-batch of all ranks is Megatron's own, and is called as its
``DefaultDynamicCPScheduler`` calls it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final
from unittest import mock

from bytescale_ext.plan.step.sizes import Cluster

SCHEDULER: Final = Path("megatron/core/datasets/data_schedule_utils.py")
"""Megatron's file with the scheduler."""


def dynamic_groups(lengths: Sequence[int], cluster: Cluster, megatron: Path) -> list[list[list[int]]]:
    """Return groups[number][rank] -> sequences of the rank's micro-batch of that number.

    Raises ValueError if a sequence needs more ranks than there are, in powers of two.
    """
    form_micro_batch = _form_micro_batch(megatron)
    left = sorted(((seq, int(length)) for seq, length in enumerate(lengths)), key=lambda sample: -sample[1])
    groups = []
    while left:
        try:
            _, left, _, group = form_micro_batch(left, cluster.num_ranks, max_seq_len_per_rank=cluster.tokens_per_rank)
        except AssertionError as error:
            raise ValueError(f"Megatron's dynamic context parallelism: {error}") from error
        groups.append(group)
    return groups


def check_source(megatron: Path) -> None:
    """Raise ValueError if a folder has no such scheduler. Imports Megatron."""
    _form_micro_batch(megatron)


def source_of(megatron: Path) -> str:
    """Return the name and the hash of the scheduler's file."""
    digest = hashlib.sha256((megatron / SCHEDULER).read_bytes()).hexdigest()
    return f"{SCHEDULER.name} {digest[:12]}"


@functools.cache
def _form_micro_batch(megatron: Path) -> Callable[..., Any]:
    """Return Megatron's function, loaded under the installed Megatron. Raises ValueError without it.

    The file imports an operator of TransformerEngine that the scheduler does not call; older releases lack its name.
    """
    from megatron.core.extensions import transformer_engine

    file = megatron / SCHEDULER
    spec = importlib.util.spec_from_file_location("dynamic_scheduler", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"--megatron {megatron}: there is no {SCHEDULER}: give a source tree of Megatron")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(transformer_engine, "get_thd_partitioned_indices", None, create=True):
        spec.loader.exec_module(module)
    found = getattr(module, "next_hdp_group_packing_aware", None)
    if found is None:
        raise ValueError(f"--megatron {megatron}: its {SCHEDULER.name} has no dynamic context parallelism")
    return found  # type: ignore[no-any-return]
