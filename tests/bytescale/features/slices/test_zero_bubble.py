"""Flag of zero bubble: its configuration, and flags that are refused together with it."""

from __future__ import annotations

import pytest

from bytescale_ext.config.slices import SliceConfig, ZeroBubble
from bytescale_ext.plan.step.sizes import Slicing
from megatron.bytescale.features.slices.zero_bubble import REFUSALS
from tests.bytescale.arguments.resolving import check_refused, resolved
from tests.bytescale.features.slices.test_flags import COMMON

pytestmark = pytest.mark.ranks
STAGES = ["--pipeline-model-parallel-size", "2", "--num-layers", "2", "--global-batch-size", "2"]
SWITCH = "--seq1f1b-zero-bubble"


def test_whole_micro_batches_and_slices() -> None:
    whole = resolved(2, *COMMON, *STAGES, SWITCH).features
    slicing = Slicing(zero_bubble=True)
    assert whole == {"slices": SliceConfig(slicing, (256,), 2), "zero_bubble": ZeroBubble(2)}
    sliced = resolved(2, *COMMON, *STAGES, SWITCH, "--seq1f1b-slices", 4, "--seq1f1b-eager").features
    assert sliced["slices"].slicing == Slicing(4, eager=True, zero_bubble=True)
    assert sliced["zero_bubble"] == ZeroBubble(6)


REFUSED = {
    "--pipeline-model-parallel-size 1": "--pipeline-model-parallel-size 1",
    "--num-layers-per-virtual-pipeline-stage": "--num-layers-per-virtual-pipeline-stage 1",
    "--num-virtual-stages-per-pipeline-rank": "--num-virtual-stages-per-pipeline-rank 2",
    "--seq1f1b-slices auto": "--seq1f1b-slices auto",
    "--recompute-granularity": "--recompute-granularity selective",
    "--recompute-activations": "--recompute-activations",
    "--activation-policy": "--activation-policy memo --host-memory-gb 0.1",
    "--swap-fraction": "--swap-fraction 0 --host-memory-gb 0.1",
    "--recompute-fraction": "--recompute-fraction 1",
    "--memory-plan": "--memory-plan plan.json",
    "--record-memory-plan": "--record-memory-plan plan.json",
}
ON_GPU = {"--transformer-impl transformer_engine", "gradient accumulation fusion"}


def test_what_does_not_work_is_refused_by_name() -> None:
    assert {row.flag for row in REFUSALS} == REFUSED.keys() | ON_GPU
    check_refused(
        *(
            (2, [*COMMON, *STAGES, SWITCH, *words.split()], f"{SWITCH} does not work with {row}: ")
            for row, words in REFUSED.items()
        )
    )
