"""Paged states with Apex's Adam in Megatron: a run continues with resident and then with paged states, bit for bit.

A class of the tests replaces Apex's Adam, which needs a GPU.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.states.test_paged import BF16, PAGED
from tests.e2e.training import HDP, MODEL, TRAIN, step_losses, train_ranks
from tests.states.test_group_counts import FusedAdam

pytestmark = pytest.mark.ranks


def train_with_apex() -> None:
    """Train as if Apex were installed (``entry``)."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    import pretrain_gpt_hdp

    optimizer.Adam = distrib_optimizer.Adam = FusedAdam
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    pretrain_gpt_hdp.main()


@pytest.mark.full
def test_a_run_goes_on_resident_and_back(tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "docs")
    flags = [*TRAIN, *MODEL, *HDP, *BF16, "--data-path", documents, "--train-iters", 6, "--hdp-tokens-per-rank", 256,
             "--use-distributed-optimizer", "--ckpt-format", "torch_dist", "--save-interval", 2]  # fmt: skip

    def losses(name: str, *others: object) -> list[float]:
        saving = ["--save", tmp_path / name, "--hdp-log-dir", tmp_path / name]
        outcome = train_ranks(1, *flags, *saving, *others, entry=train_with_apex)[0]
        assert outcome.code in (None, 0), outcome.text[-2000:]
        return step_losses(tmp_path / name)

    paged = losses("paged", *PAGED)
    resident = losses("resident", "--load", tmp_path / "paged", "--ckpt-step", 2)
    again = losses("again", "--load", tmp_path / "resident", "--ckpt-step", 4, *PAGED)
    assert len(paged) == 6
    assert resident == paged[2:]
    assert again == paged[4:]
