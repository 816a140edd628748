"""Overlap of the copies of paged states with computation, at the document lengths of a corpus.

The parameters of a layer are copied to the device while the previous layer computes. Its gradients are copied to the
host while the next layer runs backward. With long documents both copies overlap completely. In stage 1, and during the
update in all stages, the copies of a page overlap with Adam's update of the previous page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bytescale_ext.plan.activation.load import layer_seconds
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.states.forecast import StateCase
from bytescale_ext.plan.states.step_time import LayerTraffic, StateOption
from bytescale_ext.plan.states.timeline import ADAM_BYTES, Speeds


@dataclass(frozen=True, slots=True)
class Computing:
    """A share of a corpus's micro-batches, all with equal times.

    Attributes:
        share: share of all micro-batches, 0 to 1.
        forward_seconds: seconds of the forward pass of one layer.
        backward_seconds: seconds of the backward pass of one layer.
    """

    share: float
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True)
class Hiding:
    """Bytes that a process copies in a step, and their overlap.

    Attributes:
        num_bytes: bytes copied between device and host, in both directions.
        computing_bytes: bytes that overlap with passes of the model.
        adam_bytes: bytes that overlap with Adam.
    """

    num_bytes: float
    computing_bytes: float
    adam_bytes: float

    @property
    def waited_bytes(self) -> float:
        """Bytes that do not overlap with any work."""
        return max(0.0, self.num_bytes - self.computing_bytes - self.adam_bytes)


def computing_of(cost: ModelCost, lengths: Sequence[int], tokens_per_rank: int) -> tuple[Computing, ...]:
    """Return the micro-batches of documents of these lengths, with up to ``tokens_per_rank`` tokens on a rank.

    Longer documents are on as many ranks as they need. Shorter documents share micro-batches of documents of their mean
    length.
    """
    tokens = np.array([length for length in lengths if length > 0], dtype=np.float64)
    is_long = tokens >= tokens_per_rank
    groups = []
    for length, count in zip(*np.unique(tokens[is_long], return_counts=True), strict=True):
        width = -(-int(length) // tokens_per_rank)
        groups.append((count * float(width), *layer_seconds(cost, int(length), width)))
    short = tokens[~is_long]
    if len(short):
        packs = short.sum() / tokens_per_rank
        stage = cost.stage(1)
        forward, backward = (
            sum(float(part.sequence_cost(float(length), 1.0)) for length in short) / packs + part.g
            for part in (stage.forward, stage.backward)
        )
        groups.append((packs, forward, backward))
    total = sum(number for number, _, _ in groups)
    return tuple(Computing(number / total, forward, backward) for number, forward, backward in groups)


def hiding(case: StateCase, computing: Sequence[Computing], num_microbatches: int, speeds: Speeds) -> Hiding:
    """Return the copies of a step of ``num_microbatches`` that overlap with its ``computing``."""
    copied, option = case.link_bytes(num_microbatches), StateOption(case.stage, case.window_layers)
    traffic, layers = LayerTraffic.of(case, option, speeds), case.shape.num_layers
    link = speeds.link_bytes_per_second
    of_layer = (case.num_parameters - case.with_layers(0).num_parameters) / layers * case.element_bytes
    hidden = 0.0
    for part in computing:
        of_gradients = of_layer / link if case.stage > 1 else 0.0
        of_parameters = traffic.parameters if case.window_layers > 1 else 0.0
        in_backward = min(of_gradients, part.backward_seconds) + min(of_parameters, part.backward_seconds)
        hidden += part.share * (in_backward + min(of_parameters, part.forward_seconds)) * link * layers
    by_adam = 0.0
    if case.stage < 3:  # results return during Adam's step; in stage 1 gradients arrive during it too
        adam_seconds = sum(tensor.num_elements for tensor in case.tensors) * ADAM_BYTES / speeds.adam_bytes_per_second
        of_update = case.traffic()
        ways = (of_update.fetched, of_update.returned) if case.stage == 1 else (of_update.returned,)
        by_adam = sum(min(float(way), adam_seconds * link) for way in ways)
    total = float(copied.fetched + copied.returned)
    hidden = min(hidden * num_microbatches, total)
    return Hiding(total, hidden, min(by_adam, total - hidden))
