"""What the device holds between steps is what was forecast: live bytes of tensors by storage, each once, on CPU."""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.training import HDP, MODEL, TRAIN, train_ranks, train_with

pytestmark = pytest.mark.ranks

MODEL_OF_2M = [
    *MODEL,
    *"--hidden-size 256 --ffn-hidden-size 512 --vocab-size 1000 --bf16 --init-method-std 0.02".split(),
]
TINY_PAGES = "--state-policy paged --state-page-mb 0.015625".split()


def print_live_bytes(runtime: Any, model: torch.nn.Module) -> None:
    """Print what is live on the device before the step's first forward pass, and both forecasts."""
    from bytescale_ext.plan.states.forecast import StateCase

    gc.collect()
    tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor)]
    live = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    pages = {
        one.untyped_storage().data_ptr()
        for owner in gc.get_objects() if type(owner).__name__ == "PageMemory"
        for one in [owner.arena.memory]
    }  # fmt: skip
    device = sum(size for address, size in live.items() if address not in pages)
    host = sum(live[address] for address in pages)
    ranks = runtime.run.cluster.num_ranks
    case = StateCase(runtime.run.shape, 1, True, True, 2, ranks, 16384)
    print(f"LIVE {device} {host} {case.resident_bytes:.0f} {case.paged_bytes:.0f} {case.host_bytes}")


def figures(corpus: Path, *flags: str) -> list[list[float]]:
    """Return the printed figures of each step of a run on two ranks that share the optimizer."""
    sharing = ["--use-distributed-optimizer", "--hdp-tokens-per-rank", "128"]
    outcomes = train_ranks(2, *TRAIN, *MODEL_OF_2M, "--data-path", corpus, *HDP, *sharing, *flags,
                           entry=partial(train_with, print_live_bytes))  # fmt: skip
    return [
        [float(word) for word in line.split()] for line in re.findall(r"^LIVE (.*)$", outcomes[0].text, re.MULTILINE)
    ]


def test_the_device_holds_what_was_forecast(corpus: Path) -> None:
    resident, paged = figures(corpus), figures(corpus, *TINY_PAGES)
    assert len(resident) == len(paged) == 3
    for (device, _, forecast, _, _), (rest, pages, _, forecast_rest, host) in zip(resident[1:], paged[1:], strict=True):
        assert device == pytest.approx(forecast, rel=0.05)
        assert rest == pytest.approx(forecast_rest, rel=0.05)
        assert pages == pytest.approx(host, rel=0.05)
        assert device / rest == pytest.approx(2.0, rel=0.05)  # (6 + 12 / 2) / 6 bytes a parameter
