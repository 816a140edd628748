"""Device memory between steps equals the forecast, measured on CPU as the live bytes of tensor storages."""

from __future__ import annotations

import gc
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tests.e2e.devices import not_on_ghosts
from tests.e2e.once import once
from tests.e2e.training import HDP, MODEL, TRAIN, step_losses, train_ranks, train_with

pytestmark = [pytest.mark.ranks, not_on_ghosts("it measures tensors of the CPU")]

MODEL_OF_2M = [
    *MODEL,
    *"--hidden-size 256 --ffn-hidden-size 512 --vocab-size 1000 --bf16 --init-method-std 0.02 --num-layers 4".split(),
]
WINDOW: dict[int, list[object]] = {1: [], 2: [], 3: ["--state-window-layers", 1]}
TINY_PAGES = "--state-policy paged --state-page-mb 0.015625".split()


fetched: list[tuple[StorageWeakRef, int]] = []  # storages of parameters that entered a rank's window
most = [0]  # bytes of the live storages at each time


def count_fetched() -> None:
    """Track the storages that enter the window. Called once per process."""
    from bytescale_ext.states.window import HostedParameters

    fetch = HostedParameters.fetch

    def fetch_and_count(hosted: Any, link: Any) -> None:
        was_on_device = hosted.on_device
        fetch(hosted, link)
        if not was_on_device:
            fetched.extend((StorageWeakRef(one.untyped_storage()), one.nbytes) for one in hosted._copying[0])
        most[0] = max(most[0], sum(size for storage, size in fetched if not storage.expired()))

    HostedParameters.fetch = fetch_and_count  # type: ignore[method-assign]


def print_live_bytes(runtime: Any, model: torch.nn.Module) -> None:
    """Print live device bytes before the step's first forward pass, and the peak of the window in the last step.

    Also prints host memory and the forecasts.
    """
    from bytescale_ext.config.memory.states import StateConfig
    from bytescale_ext.measure.peak import tracked_objects
    from bytescale_ext.plan.states.forecast import StateCase
    from bytescale_ext.states.pages import PageMemory
    from megatron.bytescale.core.distributed.param_and_grad_buffer import HostGradients

    gc.collect()
    tensors = tracked_objects(torch.Tensor)
    live = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
    blocks = [pages.arena.memory for pages in tracked_objects(PageMemory)]
    for gradients in tracked_objects(HostGradients):
        blocks += [gradients.sums.slots, next(model.parameters()).main_grad]
    if runtime.run.find(StateConfig) is not None and runtime.run.get(StateConfig).stage == 3:
        blocks.append(next(model.parameters()))
        if not fetched:
            count_fetched()
    host = {one.untyped_storage().data_ptr() for one in blocks}
    device = sum(size for address, size in live.items() if address not in host) + most[0]
    config = runtime.run.find(StateConfig) or StateConfig(16384, 0.0)
    case = StateCase(runtime.run.shape, 1, True, True, 2, runtime.run.cluster.num_ranks, 16384, config.stage, 1)
    print(f"LIVE {device} {sum(live[one] for one in host)} {case.resident_bytes:.0f} {case.paged_bytes:.0f} "
          f"{case.host_bytes}")  # fmt: skip


def figures(corpus: Path, folder: Path, *flags: object) -> list[list[float]]:
    """Return the printed figures of each step of a run on two ranks that share the optimizer."""
    sharing = ["--use-distributed-optimizer", "--hdp-tokens-per-rank", "128", "--hdp-log-dir", folder]
    outcomes = train_ranks(2, *TRAIN, *MODEL_OF_2M, "--data-path", corpus, *HDP, *sharing, *flags,
                           entry=partial(train_with, print_live_bytes))  # fmt: skip
    return [
        [float(word) for word in line.split()] for line in re.findall(r"^LIVE (.*)$", outcomes[0].text, re.MULTILINE)
    ]


@pytest.mark.full
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_device_holds_what_was_forecast(stage: int, corpus: Path, tmp_path: Path) -> None:
    resident, losses = once(partial(resident_figures, corpus), "device bytes")
    # (6 + 12 / 2) bytes per parameter, over the resident bytes: parameters and gradients, only parameters, or one
    # layer of four and the ends
    ratio = {1: 2.0, 2: 6.0}.get(stage)
    paged = figures(corpus, tmp_path, *TINY_PAGES, "--state-stage", stage, *WINDOW[stage])
    assert len(resident) == len(paged) == 3
    assert step_losses(tmp_path) == losses
    for (device, _, forecast, *_), (rest, pages, _, forecast_rest, host) in zip(resident[1:], paged[1:], strict=True):
        assert device == pytest.approx(forecast, rel=0.05)
        assert rest == pytest.approx(forecast_rest, rel=0.05)
        assert pages == pytest.approx(host, rel=0.05)
        assert ratio is None or device / rest == pytest.approx(ratio, rel=0.05)


def resident_figures(corpus: Path, folder: Path) -> tuple[list[list[float]], list[float]]:
    """Return the figures and the losses of a run whose states stay on the device."""
    return figures(corpus, folder), step_losses(folder)
