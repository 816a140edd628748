"""QK-clip (``--qk-clip``) and the largest attention logit (``--log-max-attention-logit``) with our attention.

In Megatron the largest logits come from TransformerEngine's attention, and its checks require TransformerEngine. Here
our attention takes its place and measures them, so the flags are hidden from these checks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from bytescale_ext.config.logits import LogitConfig
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import IS_CUT, IS_LOCAL, above, given
from megatron.bytescale.arguments.options import Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.activations.flags import ACTIVATIONS
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

LOGIT_FLAGS: Final = ("qk_clip", "log_max_attention_logit")


@dataclass(frozen=True)
class LogitOptions:
    """Megatron's flags of the largest logits.

    Attributes:
        hidden_from_checks: given flags of ``LOGIT_FLAGS`` while Megatron checks its arguments, and afterwards.
    """

    qk_clip: bool
    log_max_attention_logit: bool
    qk_clip_alpha: float
    qk_clip_threshold: float
    hidden_from_checks: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the flags are Megatron's."""


def before_checks(options: LogitOptions) -> Overrides:
    """Hide the flags from Megatron's checks. Raises ValueError for values that Megatron refuses."""
    if options.qk_clip and not 0 < options.qk_clip_alpha < 1:
        raise ValueError(f"--qk-clip-alpha {options.qk_clip_alpha:g} must be between 0 and 1")
    if options.qk_clip and not options.qk_clip_threshold > 0:
        raise ValueError(f"--qk-clip-threshold {options.qk_clip_threshold:g} must be above 0")
    given_flags = tuple(name for name in LOGIT_FLAGS if getattr(options, name))
    return {**dict.fromkeys(LOGIT_FLAGS, False), "hidden_from_checks": given_flags}


def after_checks(options: LogitOptions) -> Overrides:
    """Restore the flags."""
    return dict.fromkeys(options.hidden_from_checks, True)


def resolve(options: LogitOptions, run: RunConfig) -> LogitConfig:
    """Return whether weights are clipped."""
    return LogitConfig(options.qk_clip)


def build(training: Training, runtime: Runtime) -> Training:
    """Let the attention of all layers measure its largest logits."""
    from megatron.bytescale.core.optimizer.qk_clip import measure_logits

    training.model.post_wrap_hooks.append(partial(measure_logits, runtime))
    return training


HAS_OUR_ATTENTION: Final = (
    given("hybrid_data_parallel") | IS_CUT | given("seq1f1b_zero_bubble") | (ACTIVATIONS.is_on & IS_LOCAL)
)
_CLIPS = given("qk_clip")
_COPIES = "remove it: it keeps float32 weights that QK-clip does not reach"
REFUSALS = (
    refuse("--state-update-steps", "qk_clip", "remove it: a running update would restore the weights before the clip",
           _CLIPS & above("state_update_steps", 0)),
    refuse("--use-precision-aware-optimizer", "qk_clip", _COPIES, _CLIPS & given("use_precision_aware_optimizer")),
    refuse("--optimizer-cpu-offload", "qk_clip", _COPIES, _CLIPS & given("optimizer_cpu_offload")),
    refuse("--fp8-param-gather", "qk_clip", "remove it: weights would have no rows to scale",
           _CLIPS & given("fp8_param_gather")),
    refuse("--overlap-param-gather-with-optimizer-step", "qk_clip", "remove it: it gathers parameters before the clip",
           _CLIPS & given("overlap_param_gather_with_optimizer_step")),
    refuse("--draft-heads", "qk_clip", "remove it: the model under draft heads does not change", given("draft_heads")),
)  # fmt: skip

QK_CLIP = Feature(
    name="qk_clip",
    flag="--qk-clip",
    summary="largest attention logits of documents and slices, and QK-clip",
    add_arguments=add_arguments,
    is_on=given("hidden_from_checks") | ((given("qk_clip") | given("log_max_attention_logit")) & HAS_OUR_ATTENTION),
    options=LogitOptions,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    after_checks=after_checks,
    other_flags=("--log-max-attention-logit",),
    refusals=REFUSALS,
)
