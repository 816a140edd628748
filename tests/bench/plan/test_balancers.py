"""The comparison of balancers runs a module of verl's form and prints a row for each case."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from scripts.bench.plan.balancers import row_of, table, verl_module

FAKE = """
from verl.protocol import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name

def calculate_workload(lengths):
    return lengths * 100 + lengths**2

def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    return [list(range(part, len(seqlen_list), k_partitions)) for part in range(k_partitions)]
"""


def test_a_bad_balancer_is_slower(tmp_path: Path) -> None:
    (tmp_path / "balancing.py").write_text(FAKE)
    lengths = np.random.default_rng(1).integers(10, 4000, 400)
    row = row_of(2, 4096, lengths, verl_module(tmp_path / "balancing.py"))
    assert 1.0 <= row.whole < row.verl
    assert 1.0 <= row.rings < row.verl
    assert table([row]).splitlines()[-1].startswith("| 2 | 4,096 | ")
