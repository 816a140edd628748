"""Memory that torch's allocator reserves in a training whose micro-batches differ in size, on hollow ghost GPUs.

    FRAGMENTATION_STEPS=200 .venv/bin/python -m pytest -m "" -rP tests/ghost/test_fragmentation.py

Layers have the sizes of ByteScale's 7B model, documents the lengths of its Byted data, GPUs have 80 GB.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.evaluate.length_samplers import sample_documents
from tests.e2e.activation.test_forecasts import print_forecast
from tests.e2e.corpora import write_documents
from tests.e2e.devices import run_trainings
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, train_in_process, train_with
from tests.ghost.devices import HOLLOW_ENGINE_GPUS, HOLLOW_GPUS, needs_ghosts
from tests.ghost.engine import needs_engine
from tests.harness import HANG_SECONDS, Devices, ranks_on

pytestmark = [pytest.mark.ranks, needs_ghosts]

STEPS = int(os.environ.get("FRAGMENTATION_STEPS", "6"))
TIMEOUT = HANG_SECONDS * max(1, STEPS // 20)
DOCUMENTS = 8  # of a step
RANK_TOKENS, LONGEST = 8192, 16384  # on two ranks
SIZES = (
    f"--hidden-size {LLAMA_7B.hidden} --ffn-hidden-size {LLAMA_7B.ffn_hidden} "
    f"--num-attention-heads {LLAMA_7B.num_heads} "
    f"--seq-length {LONGEST} --max-position-embeddings {LONGEST} --hdp-tokens-per-rank {RANK_TOKENS} "
    f"--make-vocab-size-divisible-by {LLAMA_7B.vocab} --chunked-cross-entropy 2048 "
    f"--global-batch-size {DOCUMENTS} --train-iters {STEPS} --log-interval 1 --bf16 "
    "--no-check-for-nan-in-loss-and-grad"
).split()
GROUPS = f"--group-query-attention --num-query-groups {LLAMA_7B.num_kv_heads}".split()
CASES = {
    "no policy": "--num-layers 6",
    "memo": "--num-layers 8 --activation-policy memo --swap-fraction 0.4 --host-memory-gb 6",
    "recompute": "--num-layers 8 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "slices": "--num-layers 12 --pipeline-model-parallel-size 2 --seq1f1b-slices 4 --hdp-tokens-per-rank 16384",
}
LATENT = (
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm"
)
PRICED = "--num-layers 8 --activation-policy priced --swap-fraction 0.3 --recompute-fraction 0.5 --host-memory-gb 6"
ENGINE_CASES = CASES | {
    "latent attention": f"--num-layers 6 {LATENT}",
    "latent attention, memo": f"{CASES['memo']} {LATENT}",
    "latent attention, priced": f"{PRICED} {LATENT}",
    "latent attention, slices": f"{CASES['slices']} {LATENT}",
    "later tokens, memo": f"{CASES['memo']} --mtp-num-layers 1",
}
SHORTEST = 512
UPDATES = {
    "Adam": "--use-distributed-optimizer",
    "Adam, 16-bit gradients": "--grad-reduce-in-bf16",
    "SGD": "--optimizer sgd",
    "Muon": "--optimizer muon",
}
"""Trainings of short documents, whose peak is the update."""
LAUNCHERS = Path(__file__).resolve().parents[2] / "scripts"


@dataclass(frozen=True)
class Peaks:
    """Peaks of a rank's caching allocator in bytes, and the highest forecast of a step.

    Attributes:
        allocated: bytes of tensors.
        reserved: bytes that the allocator took from the device.
        retries: number of times that it returned memory to the device to take other memory.
        forecast: bytes that the plans of the steps forecast.
    """

    allocated: float
    reserved: float
    retries: int
    forecast: float

    @property
    def ratio(self) -> float:
        """Reserved over allocated bytes."""
        return self.reserved / self.allocated


def train_and_print_peaks() -> None:
    """Entry that prints the peaks of this rank's allocator. Probes of kernels would compute nothing here."""
    import torch

    from bytescale_ext.attention.kernels import table

    table.probe_here = lambda *_: None  # type: ignore[assignment]
    train_with(print_forecast)
    stats = torch.cuda.memory_stats()
    peaks = [stats[f"{kind}_bytes.all.peak"] for kind in ("allocated", "reserved")]
    print("PEAKS", json.dumps([*peaks, stats["num_alloc_retries"]]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = sample_documents("byted", LONGEST, DOCUMENTS * STEPS, seed=1)
    return write_documents(tmp_path_factory.mktemp("byted") / "docs", lengths, copies=1)


def peaks_of(devices: Devices, words: str, corpus: Path, steps: int = STEPS) -> list[Peaks]:
    """Return the peaks of each rank on hollow ghost GPUs with flags."""
    groups = MODEL.index("--group-query-attention")
    model = [*MODEL[:groups], *MODEL[groups + 3 :], *([] if "--multi-latent-attention" in words else GROUPS)]
    flags = [*model, *TRAIN, *HDP, *SIZES, *words.split(), "--train-iters", steps, "--data-path", corpus]
    with ranks_on(devices):
        outcomes: list[Outcome] = run_trainings(
            train_in_process, 2, ["pretrain_gpt_hdp.py", *map(str, flags)], train_and_print_peaks, timeout=TIMEOUT
        )
    assert not any(outcome.code for outcome in outcomes), outcomes[0].text[-2000:]
    assert len(re.findall(r"^ run: ", outcomes[-1].text, re.MULTILINE)) == steps
    return [read_peaks(outcome.text) for outcome in outcomes]


def read_peaks(text: str) -> Peaks:
    """Return the figures that ``train_and_print_peaks`` printed."""
    forecasts = [json.loads(line)[1] for line in re.findall(r"^FORECAST (.*)$", text, re.MULTILINE)]
    return Peaks(*json.loads(re.findall(r"^PEAKS (.*)$", text, re.MULTILINE)[-1]), max(forecasts))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_the_launchers_settings_reserve_little_more_than_is_used(case: str, corpus: Path) -> None:
    words = f"{CASES[case]} --use-distributed-optimizer"
    found = {settings: peaks_of(devices, words, corpus) for settings, devices in HOLLOW_GPUS.items()}
    for settings, ranks in found.items():
        for rank, peaks in enumerate(ranks):
            print(
                f"{case}, {settings or 'default'}, rank {rank}: allocated {peaks.allocated / 1e9:.2f} GB, reserved "
                f"{peaks.reserved / 1e9:.2f} GB, {peaks.ratio:.3f}, retries {peaks.retries}, forecast "
                f"{peaks.forecast / 1e9:.2f} GB"
            )
    assert all(peaks.ratio <= 1.10 and not peaks.retries for peaks in found["expandable_segments:True"])


@pytest.mark.full
@pytest.mark.parametrize("case", UPDATES)
def test_the_update_is_in_the_forecast(case: str, tmp_path: Path) -> None:
    """Forecasts are equal to the allocator's peak if an update has it."""
    short = f"--seq-length {SHORTEST} --max-position-embeddings {SHORTEST} --hdp-tokens-per-rank {SHORTEST}"
    corpus = write_documents(tmp_path / "docs", [SHORTEST // 2] * DOCUMENTS * 2, copies=1)
    words = f"--num-layers 2 {short} {UPDATES[case]}"
    for peaks in peaks_of(HOLLOW_GPUS["expandable_segments:True"], words, corpus, steps=2):
        print(f"{case}: allocated {peaks.allocated / 1e9:.3f} GB, forecast {peaks.forecast / 1e9:.3f} GB")
        assert peaks.forecast == pytest.approx(peaks.allocated, rel=0.05)


@pytest.mark.full
@needs_engine
@pytest.mark.parametrize("case", ENGINE_CASES)
def test_forecasts_hold_for_transformer_engine(case: str, corpus: Path) -> None:
    words = f"{ENGINE_CASES[case]} --use-distributed-optimizer --transformer-impl transformer_engine"
    for rank, peaks in enumerate(peaks_of(HOLLOW_ENGINE_GPUS, words, corpus)):
        print(
            f"{case}, rank {rank}: allocated {peaks.allocated / 1e9:.2f} GB, reserved {peaks.ratio:.3f} times as much, "
            f"forecast {peaks.forecast / peaks.allocated:.3f} of it"
        )
        assert peaks.forecast == pytest.approx(peaks.allocated, rel=0.05)


def test_the_settings_are_those_of_the_launchers() -> None:
    for launcher in ("train_local.sh", "train_slurm.sbatch"):
        assert "PYTORCH_ALLOC_CONF:-expandable_segments:True}" in (LAUNCHERS / launcher).read_text()
