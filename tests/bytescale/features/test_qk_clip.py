"""QK-clip and the largest logits: their settings, what switches the feature on, and refused combinations."""

from __future__ import annotations

from pathlib import Path

import pytest

from bytescale_ext.config.logits import LogitConfig
from megatron.bytescale.features.qk_clip import QK_CLIP
from tests.bytescale.arguments.resolving import check_refused, resolve_lines
from tests.data.sources import write_data_set
from tests.e2e.training import HDP, MODEL, TRAIN

pytestmark = pytest.mark.ranks

CLIP = ["--qk-clip", "--qk-clip-threshold", "50"]
REFUSED = (
    ("--state-policy paged --state-update-steps 1", "--state-update-steps: remove it: a running update"),
    ("--bf16 --use-distributed-optimizer --use-precision-aware-optimizer", "--use-precision-aware-optimizer: remove"),
    ("--optimizer-cpu-offload", "--optimizer-cpu-offload: remove it: it keeps float32 weights"),
    ("--bf16 --fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather", "--fp8-param-gather: remove it"),
    ("--overlap-param-gather-with-optimizer-step", "--overlap-param-gather-with-optimizer-step: "),
    ("--draft-heads clover", "--draft-heads: remove it: the model under"),
    ("--qk-clip-alpha 1", "--qk-clip-alpha 1 must be between 0 and 1"),
    ("--qk-clip-threshold 0", "--qk-clip-threshold 0 must be above 0"),
)


def test_what_is_refused_and_what_runs(tmp_path: Path) -> None:
    write_data_set(tmp_path / "a", [[[1, 2, 3]]])
    common = [*MODEL, *TRAIN, "--data-path", str(tmp_path / "a"), "--hidden-dropout", "0"]
    with_hdp = [*common, *HDP, "--hdp-tokens-per-rank", "256"]
    samples = [*common, "--micro-batch-size", "1"]
    check_refused(
        *((1, [*with_hdp, *CLIP, *words.split()], message) for words, message in REFUSED),
        (1, [*samples, *CLIP], "--qk-clip is only supported with TE"),  # Megatron's attention measures nothing
        (1, [*samples, "--log-max-attention-logit"], "only supported with TE"),
    )
    pipeline = "--pipeline-model-parallel-size 2 --seq1f1b-slices 2".split()
    clipping, logging, late, slices, policy = resolve_lines(
        (1, [*with_hdp, *CLIP]),
        (1, [*with_hdp, "--log-max-attention-logit"]),
        (1, [*with_hdp, "--log-max-attention-logit", *"--state-policy paged --state-update-steps 1".split()]),
        (2, [*samples, *CLIP, *pipeline]),
        (1, [*samples, *CLIP, *"--swap-fraction 0.5 --host-memory-gb 0.01".split()]),
    )
    for found, clips in ((clipping, True), (logging, False), (late, False), (slices, True), (policy, True)):
        assert found.error is None, found.error
        assert found.features[QK_CLIP.name] == LogitConfig(clips)
        assert (found.args["qk_clip"], found.args["log_max_attention_logit"]) == (clips, not clips)
        assert found.decision.setup.numerics.measures_logits
