"""The activations of a training step take the bytes that a dry run predicts, for many models and policies.

``--hdp-memory-step`` counts live tensor storages on CPU. Each step has full micro-batches, as forecasts assume.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.e2e.corpora import documents
from tests.e2e.devices import not_on_ghosts
from tests.e2e.training import HDP, MODEL, TRAIN, Outcome, train_ranks, train_with
from tests.sample import sampled

pytestmark = [pytest.mark.ranks, not_on_ghosts("it measures tensors of the CPU")]

TOKENS = 512
STEPS = 2
GROUPS = MODEL.index("--group-query-attention")
SIZES = (
    f"--num-layers 5 --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 8 --init-method-std 0.02 "
    f"--seq-length {TOKENS} --max-position-embeddings {TOKENS} --global-batch-size 2 --train-iters {STEPS} "
    f"--hdp-tokens-per-rank {TOKENS} --hdp-memory-step {STEPS} --hdp-learn-costs off --chunked-cross-entropy 64"
).split()
LATENT = [
    *MODEL[:GROUPS],
    *MODEL[GROUPS + 3 :],
    *"--multi-latent-attention --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32".split(),
    *"--qk-layernorm --rope-type yarn --rotary-scaling-factor 4 --mscale 1.0 --mscale-all-dim 0.5".split(),
]
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 344 --moe-router-load-balancing-type none".split()
MODELS = {
    "latent": [*LATENT, "--q-lora-rank", "96"],
    "latent without query latent": LATENT,
    "later tokens": [*MODEL, *"--mtp-num-layers 1".split()],
    "experts": [*MODEL, *EXPERTS],
    "first layer dense": [*MODEL, *EXPERTS, *"--moe-layer-freq [0]+[1]*4".split()],
    "every other layer dense": [*MODEL, *EXPERTS, *"--moe-layer-freq 2".split()],
    "latent and later tokens": [*LATENT, *"--q-lora-rank 96 --mtp-num-layers 2".split()],
}
HOST = "--host-memory-gb 0.2"
POLICIES = {
    "none": "",
    "full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "block": "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
    "memo": f"--activation-policy memo --swap-fraction 0.4 {HOST}",
    "priced": f"--activation-policy priced --swap-fraction 0.3 --recompute-fraction 0.5 {HOST}",
    "swap": f"--swap-fraction 1 {HOST}",
}
CASES = [(model, policy) for model in MODELS for policy in POLICIES]
SAMPLE = [("first layer dense", "block")]


@dataclass(frozen=True)
class Measured:
    """Forecast and measured bytes of the last step of a rank: of model states, and of everything at its peak."""

    states: float
    total: float
    existing: float
    live: float

    @classmethod
    def of(cls, outcome: Outcome) -> Measured:
        """Read the last figures of ``train_and_measure``. The training must have ended without an error."""
        assert outcome.code is None, outcome.text[-2000:]
        *_, forecast = re.findall(r"^FORECAST (.*)$", outcome.text, re.MULTILINE)
        existing, live = (
            float(re.findall(rf"^{word} (.*)$", outcome.text, re.MULTILINE)[-1]) for word in ("EXISTING", "LIVE")
        )
        return cls(*json.loads(forecast), existing, live)

    def check(self, name: str) -> None:
        """Check that the forecast of activations, and of all bytes, is within 5 % of the measured bytes."""
        predicted, live = self.total - self.states, self.live - self.existing
        print(f"{name}: states {self.states / self.existing:.3f}, activations {predicted / live:.3f}")
        assert self.states == pytest.approx(self.existing, rel=0.06)  # no rotary angles, no tensors of dispatchers
        assert predicted == pytest.approx(live, rel=0.05)
        assert self.total == pytest.approx(self.live, rel=0.05)


def train_and_measure() -> None:
    """Entry that prints the forecast of each step, [states, total], its live bytes, and the bytes that exist before."""
    from bytescale_ext.measure.peak import PeakMeter

    begin, end = PeakMeter.begin, PeakMeter.end

    def begin_and_print(self: PeakMeter, on_cuda: bool, host: Any = ()) -> None:
        begin(self, on_cuda, host)
        print("EXISTING", sum(storage.nbytes() for storage in self._storages.values()))

    def end_and_print(self: PeakMeter) -> float:
        live = end(self)
        if live:
            print("LIVE", live)
        return live

    PeakMeter.begin, PeakMeter.end = begin_and_print, end_and_print  # type: ignore[method-assign]
    train_with(print_forecast)


def print_forecast(runtime: Any, model: torch.nn.Module) -> None:
    """Print the forecast of this step's memory on the stage of this rank, in bytes."""
    from megatron.core import parallel_state

    from bytescale_ext.plan.setup.forecast import Forecast

    forecast = Forecast(runtime.run.decision)
    stages = forecast.memory(*forecast.table(runtime.step.batch.plan))
    device = stages[parallel_state.get_pipeline_model_parallel_rank()].device
    print("FORECAST", json.dumps([device.states, device.total]))


@pytest.mark.parametrize(("model", "policy"), sampled(CASES, SAMPLE))
def test_a_step_takes_the_memory_that_a_dry_run_predicts(model: str, policy: str) -> None:
    corpus = documents((TOKENS,), copies=8)
    words = [*MODELS[model], *TRAIN, *HDP, *SIZES, *POLICIES[policy].split()]
    (outcome,) = train_ranks(1, *words, "--data-path", corpus, entry=train_and_measure)
    Measured.of(outcome).check(f"{model}, {policy}")
