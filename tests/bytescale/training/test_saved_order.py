"""The order of samples that a resumed run continues."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest

from bytescale_ext.data.samples.epochs import NO_LIMIT, SHUFFLE_LIMIT
from megatron.bytescale.core.datasets.document_dataset import DocumentConfig
from megatron.bytescale.training import training

NEW = {"seq_length": 64, "hybrid_data_parallel": True}


@pytest.mark.parametrize(
    ("saved", "limit"),
    [
        ({**NEW, "consumed_train_samples": 0}, SHUFFLE_LIMIT),
        ({**NEW, "consumed_train_samples": 5}, NO_LIMIT),
        ({**NEW, "consumed_train_samples": 5, "hdp_shuffle_limit": 77}, 77),
        ({"seq_length": 64, "consumed_train_samples": 5}, SHUFFLE_LIMIT),
    ],
    ids=["nothing consumed", "no order recorded", "order recorded", "samples of one length"],
)
def test_a_run_continues_in_the_order_of_its_checkpoint(
    saved: dict[str, Any], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = Namespace(**NEW)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    for name in ("restore_costs", "print_rank_0"):
        monkeypatch.setattr(training, name, lambda *_: None)
    runtime: Any = SimpleNamespace(log=SimpleNamespace(tokens_so_far=0))
    training.wrap_check_checkpoint_args(lambda saved: None, runtime)(Namespace(**saved))
    config = DocumentConfig(random_seed=1, sequence_length=64, blend=(["a"], None), split="100,0,0")  # type: ignore[arg-type]
    assert config.in_saved_order().shuffle_limit == limit
    assert args.hdp_shuffle_limit == limit  # the next checkpoint contains the arguments
    assert config.shuffle_limit == SHUFFLE_LIMIT
