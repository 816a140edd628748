"""The features that a run can have beyond Megatron: a file or folder for each feature, and the table of features.

To add a feature, write one file here and add its row to ``FEATURES``; its decisions belong in ``bytescale_ext/plan/``.
Flags, refusals, patches, ``resolve``, ``build`` and ``bytescale doctor`` read the table.

Importing this package imports neither torch nor Megatron; features import the modules for their builds inside
functions.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from megatron.bytescale.arguments.bad_input import Reasons
from megatron.bytescale.arguments.options import override
from megatron.bytescale.arguments.positions import POSITION_REFUSALS
from megatron.bytescale.arguments.refusals import REFUSALS, Refusal, refuse_conflicts
from megatron.bytescale.arguments.unused import UNUSED_REFUSALS
from megatron.bytescale.features.activations.flags import ACTIVATIONS
from megatron.bytescale.features.activations.memory_plan import MEMORY_PLAN
from megatron.bytescale.features.drafts.flags import DRAFTS
from megatron.bytescale.features.experts.flags import EXPERTS
from megatron.bytescale.features.experts.trace import EXPERT_TRACE
from megatron.bytescale.features.feature import COST_FLAG, Feature
from megatron.bytescale.features.fp8 import FP8
from megatron.bytescale.features.gate.flags import GATE
from megatron.bytescale.features.hdp.flags import HDP
from megatron.bytescale.features.loss_chunks import LOSS_CHUNKS
from megatron.bytescale.features.memory_record.flags import MEMORY_RECORD
from megatron.bytescale.features.multi_token import MULTI_TOKEN
from megatron.bytescale.features.preferences import PREFERENCES
from megatron.bytescale.features.qk_clip import QK_CLIP
from megatron.bytescale.features.ray import RAY
from megatron.bytescale.features.sculpt import SCULPT
from megatron.bytescale.features.sft import SFT
from megatron.bytescale.features.slices.flags import SLICES
from megatron.bytescale.features.slices.zero_bubble import ZERO_BUBBLE
from megatron.bytescale.features.states.flags import STATES
from megatron.bytescale.features.tables.flags import TABLES
from megatron.bytescale.features.upcycle.flags import UPCYCLING

if TYPE_CHECKING:
    from megatron.bytescale.registry import Patch

FEATURES: tuple[Feature[Any], ...] = (
    HDP,
    RAY,
    SCULPT,
    SFT,
    PREFERENCES,
    SLICES,
    ZERO_BUBBLE,
    LOSS_CHUNKS,
    MULTI_TOKEN,
    FP8,
    DRAFTS,
    ACTIVATIONS,
    MEMORY_PLAN,
    MEMORY_RECORD,
    STATES,
    EXPERT_TRACE,
    TABLES,
    EXPERTS,
    GATE,
    UPCYCLING,
    QK_CLIP,
)
"""Table of features, in the order of resolving and building; each may use the results of earlier features."""


def enabled(args: argparse.Namespace) -> list[Feature[Any]]:
    """Return the enabled features, in the table's order."""
    return [feature for feature in FEATURES if feature.is_on(args)]


def refusals() -> list[Refusal]:
    """Return the refusals of all features and of every run."""
    return [*(row for feature in FEATURES for row in feature.refusals), *REFUSALS, *POSITION_REFUSALS, *UNUSED_REFUSALS]


def patches_of(names: Collection[str]) -> list[Patch]:
    """Return the patch rows that these features add to the table in ``patches.py``."""
    return [row for feature in FEATURES if feature.name in names for row in feature.patches()]


def check(args: argparse.Namespace) -> None:
    """Check the flags of all features, and set the Megatron arguments that enabled features need.

    Call it before Megatron checks its arguments. Raises ``Refused`` with every reason, each naming a flag.
    """
    reasons, on = Reasons(), enabled(args)
    names = {feature.name for feature in on}
    borrowed = {flag for feature in on for flag in feature.borrows(feature.read(args))}
    for feature in FEATURES:
        if feature.name not in names:
            reasons.add(*_given_without(feature, args, borrowed))
        elif missing := [other for other in FEATURES if other.name in feature.requires and other.name not in names]:
            reasons.add(f"{feature.switch(args)} needs {missing[0].flag}")
    reads_cost = COST_FLAG in borrowed or any(feature.reads_cost for feature in on)
    if args.cost_file is not None and not reads_cost:
        readers = " or ".join(feature.flag for feature in FEATURES if feature.reads_cost)
        reasons.add(f"{COST_FLAG} needs {readers}")
    with reasons.collect():
        refuse_conflicts(args, {feature.name: feature.switch(args) for feature in on}, refusals())
    for feature in on:
        with reasons.collect():
            override(args, feature.before_checks(feature.read(args)))
    reasons.refuse()


def check_after(args: argparse.Namespace) -> None:
    """Set arguments that enabled features need but Megatron's checks have changed. Call it after Megatron's checks."""
    for feature in enabled(args):
        override(args, feature.after_checks(feature.read(args)))


def _given_without(feature: Feature[Any], args: argparse.Namespace, borrowed: Collection[str]) -> Iterator[str]:
    """Yield a reason for each given flag of a disabled feature, except its switch and borrowed flags."""
    for action in feature.actions():
        (flag,) = action.option_strings
        if flag not in (*feature.switches, *borrowed) and getattr(args, action.dest) != action.default:
            yield f"{flag} needs {feature.needs or feature.flag}"
