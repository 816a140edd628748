"""A run with paged Adam states equals the resident run, and each continues from the other's checkpoint.

Runs are equal bit for bit, unless processes share gradients, which they add in any order.

The layouts cover every pair of tensor parallelism, pipelines and hybrid data parallelism, each precision and optimizer.
In some runs most pages are on a disk, and gradients and parameters leave the device too.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bytescale_ext.states.disks import IN_MEMORY, file_system_of
from tests.e2e.corpora import write_documents
from tests.e2e.devices import on_ghosts
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, step_losses, train_ranks, train_with
from tests.harness import run_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TIED = [flag for flag in MODEL if not flag.startswith("--untie")]
TP = "--tensor-model-parallel-size 2 --make-vocab-size-divisible-by 64".split()
PP = "--pipeline-model-parallel-size 2".split()
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather".split()
BF16 = "--bf16 --init-method-std 0.02".split()
SAMPLES = "--micro-batch-size 1 --seq-length 64".split()
EVALUATE = "--split 60,20,20 --eval-interval 2 --eval-iters 1".split()
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
CLIP = "--qk-clip --qk-clip-threshold 0.001 --qk-clip-alpha 0.3".split()  # below all largest logits
LATER = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5".split()
STEPS, SAVED = 6, 3
# A page has 1024 elements: the smallest model has 14,000 on a rank.
PAGED = "--state-policy paged --state-page-mb 0.00390625 --state-host-gb 1".split()
HOST_GB = 7e-5  # 17 pages, mostly for pages in flight
HOST_GB_OF_STAGE_3 = 2.5e-4  # also half of the gradients and parameters, and slots of gradients

# name: (ranks, flags)
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "documents, bf16, zero1": (
        2,
        [*MODEL, *HDP, *BF16, *SHARDED, *EVALUATE, "--hdp-tokens-per-rank", "128", "--ckpt-format", "torch_dist"],
    ),
    "samples, tp, bf16, tied": (2, [*TIED, *SAMPLES, *TP, *BF16]),
    "samples in slices, pp, zero1": (4, [*MODEL, *SAMPLES, *PP, SHARDED[0], "--seq1f1b-slices", "2"]),
    "documents, tp, pp": (
        4,
        [*MODEL, *HDP, *TP, *PP, *RECOMPUTE, "--sequence-parallel", "--hdp-tokens-per-rank", "256"],
    ),
    "documents, later tokens": (2, [*MODEL, *HDP, *LATER, *BF16, *SHARDED, "--hdp-tokens-per-rank", "128"]),
    "documents, later tokens, pp, tied": (4, [*TIED, *HDP, *LATER, *PP, SHARDED[0], "--hdp-tokens-per-rank", "128"]),
    "documents, clipped, bf16, zero1": (
        2,
        [
            *MODEL,
            *HDP,
            *CLIP,
            *BF16,
            *SHARDED,
            *EVALUATE,
            "--hdp-tokens-per-rank",
            "128",
            "--ckpt-format",
            "torch_dist",
        ],
    ),
    "documents, clipped, bf16, pp, zero1": (
        4,
        [*TIED, *HDP, *CLIP, *BF16, *PP, SHARDED[0], "--hdp-tokens-per-rank", "128"],
    ),
    "documents, later tokens, tp": (4, [*MODEL, *HDP, *LATER, *TP, "--hdp-tokens-per-rank", "128"]),
}
RESUMED = ("documents, bf16, zero1", "samples, tp, bf16, tied", "documents, clipped, bf16, zero1")
ON_DISK = ("documents, bf16, zero1", "samples in slices, pp, zero1", "documents, clipped, bf16, zero1")
WINDOW = ["--state-stage", 3, "--state-window-layers", 1]
GRADIENTS = WINDOW if on_ghosts() else ["--state-stage", 2]  # on GPUs stage 2 needs --bf16
STAGES: dict[str, list[object]] = {
    "samples, tp, bf16, tied": WINDOW,
    "samples in slices, pp, zero1": WINDOW,
    "documents, tp, pp": GRADIENTS,
    "documents, later tokens, pp, tied": WINDOW,
    "documents, clipped, bf16, pp, zero1": WINDOW,
    "documents, later tokens, tp": GRADIENTS,
}  # all other layouts: stage 1
# Two processes hold the same gradients and parameters.
SHARED = (
    "samples in slices, pp, zero1",
    "documents, later tokens, pp, tied",
    "documents, clipped, bf16, pp, zero1",
)
ROUNDING = 1e-5
OF_DEVICE = ROUNDING if on_ghosts() else 0.0  # a resident run on a GPU updates there, a paged run on the CPU


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a private copy, because Megatron writes its sample index next to the data set."""
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs", copies=2)


def run(name: str, documents: Path, folder: Path, *flags: object) -> list[Outcome]:
    num_ranks, layout = LAYOUTS[name]
    logged = ["--hdp-log-dir", folder] if "--hybrid-data-parallel" in layout else []
    common = [*TRAIN, "--train-iters", STEPS, "--save-interval", SAVED, "--data-path", documents]
    outcomes = train_ranks(num_ranks, *common, *layout, *logged, "--save", folder, *flags)
    assert outcomes[0].code in (None, 0), outcomes[0].text[-2000:]
    assert ("largest attention logit" in outcomes[-1].text) == ("--qk-clip" in layout)
    assert ("states in pages of 4,096 bytes" in outcomes[0].text) == ("paged" in flags)
    assert (" pages in " in outcomes[0].text) == ("--state-nvme" in flags)
    return outcomes


def with_disk(folder: Path, host_gb: float = HOST_GB) -> list[object]:
    """Return the flags of pages on a disk, in a folder next to the run's folder."""
    folder.mkdir()
    if file_system_of(folder) in IN_MEMORY:
        pytest.skip(f"{folder} is host memory")
    return [*PAGED, "--state-nvme", folder, "--state-host-gb", host_gb]


def tensors_of(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a checkpoint with their names."""
    if isinstance(state, torch.Tensor):
        yield name, state
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in items:
        yield from tensors_of(value, f"{name}/{key}")


def compared(
    rank: int, world: int, folders: tuple[Path, Path], steps: int = STEPS, rounding: float = 0.0
) -> tuple[int, list[str]]:
    """Return the number of tensors in the last checkpoint of two runs, and the names of different tensors.

    Random states are left out. Only Megatron's samplers draw from them, at the start of a run.
    """
    count, different = 0, []
    one, other = (folder / f"iter_{steps:07d}" for folder in folders)
    files = sorted(path.relative_to(one) for path in one.rglob("*.pt"))
    assert files
    for file in files:
        states = [
            dict(tensors_of(torch.load(folder / file, weights_only=False, map_location="cpu")))
            for folder in (one, other)
        ]
        states = [{key: value for key, value in state.items() if "rng_state" not in key} for state in states]
        assert states[0].keys() == states[1].keys()
        count += len(states[0])
        different += [
            f"{file}{key}"
            for key, value in states[0].items()
            if not torch.allclose(value, states[1][key], rounding, rounding)
        ]
    return count, different


def assert_equal(name: str, runs: tuple[list[Outcome], list[Outcome]], folders: tuple[Path, Path]) -> None:
    """Check the losses of all steps that both have run, and the last checkpoint."""
    rounding = ROUNDING if name in SHARED else OF_DEVICE
    if "--hybrid-data-parallel" in LAYOUTS[name][1]:
        losses, expected = map(step_losses, folders)
        assert losses == pytest.approx(expected[-len(losses) :], abs=rounding)
        assert len(losses) in (STEPS, STEPS - SAVED)
    printed, expected = (outcomes[-1].losses for outcomes in runs)
    assert printed[-1] == pytest.approx(expected[-1], abs=rounding)
    if len(printed) != STEPS - SAVED:  # the second log line of a resumed run shows the mean of two steps
        assert printed == pytest.approx(expected, abs=rounding)
    validation = [outcomes[-1].validation_losses[-2:] for outcomes in runs]
    assert validation[0] == pytest.approx(validation[1], abs=rounding)
    if "torch_dist" not in LAYOUTS[name][1]:
        count, different = run_ranks(compared, 1, folders, STEPS, rounding, init_group=False)[0]
        assert different == []
        assert count > 15


@pytest.mark.parametrize("name", sampled(LAYOUTS, ["samples in slices, pp, zero1"]))
def test_paged_is_resident(name: str, documents: Path, tmp_path: Path) -> None:
    folders = [tmp_path / kind for kind in ("paged", "resident", "paged then resident", "resident then paged")]
    host_gb = HOST_GB_OF_STAGE_3 if name in STAGES else HOST_GB
    pages = [*(with_disk(tmp_path / "pages", host_gb) if name in ON_DISK else PAGED), *STAGES.get(name, [])]
    paged = run(name, documents, folders[0], *pages)
    resident = run(name, documents, folders[1])
    assert_equal(name, (paged, resident), (folders[0], folders[1]))
    if name in RESUMED:
        of_step = ["--ckpt-step", SAVED, "--load"]
        then_resident = run(name, documents, folders[2], *of_step, folders[0])
        pages = with_disk(tmp_path / "more pages") if name not in ON_DISK else pages
        then_paged = run(name, documents, folders[3], *of_step, folders[1], *pages)
        assert_equal(name, (then_resident, resident), (folders[2], folders[1]))
        assert_equal(name, (then_paged, resident), (folders[3], folders[1]))


def test_too_little_host_memory_is_one_line(documents: Path) -> None:
    flags = [*TRAIN, *MODEL, *SAMPLES, "--data-path", documents, *PAGED, "--state-host-gb", 1e-5]
    outcome = train_ranks(1, *flags)[0]
    assert outcome.code == 2
    assert "error: model states of each process take 0.001 GB of host memory in pages of 4,096 bytes" in outcome.text


steps: list[int] = []  # page files written so far by this process


def fill_the_disk(runtime: Any, model: torch.nn.Module) -> None:
    """Refuse to write pages from the third step on."""

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    steps.append(0)
    if len(steps) == 3:
        os.pwritev = refuse


def test_a_full_disk_ends_the_run_with_the_step_saved(documents: Path, tmp_path: Path) -> None:
    """The run saves the step in which the disk fills up, and a resident run continues from this checkpoint."""
    hdp = [*HDP, "--hdp-tokens-per-rank", 256]
    flags = [*TRAIN, *MODEL, *hdp, *BF16, "--data-path", documents, "--train-iters", STEPS, "--save", tmp_path / "one"]
    pages = [*with_disk(tmp_path / "pages"), "--hdp-log-dir", tmp_path / "full"]
    full = train_ranks(1, *flags, *pages, entry=partial(train_with, fill_the_disk))[0]
    assert full.code in (None, 0), full.text[-2000:]
    assert "failed: No space left on device; they stay in host memory. This step is complete" in full.text
    assert len(full.losses) == 3
    train_ranks(1, *flags, "--load", tmp_path / "one", "--hdp-log-dir", tmp_path / "then")
    train_ranks(1, *flags[:-1], tmp_path / "two", "--hdp-log-dir", tmp_path / "whole")
    full_losses, then, whole = (step_losses(tmp_path / name) for name in ("full", "then", "whole"))
    assert [*full_losses, *then] == pytest.approx(whole, abs=OF_DEVICE)
