"""Choice of the layers of a stage that are recomputed: least time within the memory.

Galvatron (Miao et al. 2022, section 3.3) chooses layer by layer and keeps the fastest choice for each amount of memory,
in steps. Here memory has no steps: among the choices for the first layers, all choices stay that no other choice beats
in both memory and time. So the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from bytescale_ext.plan.setup.forecast import tokens_in_flight
from bytescale_ext.plan.setup.memory import input_bytes, stage_memory
from bytescale_ext.plan.setup.setup import Setup


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice for a layer: keep its activations, or recompute them.

    Attributes:
        bytes: bytes that the layer stores until its backward pass.
        seconds: additional time of the layer.
    """

    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class LayerChoices:
    """A choice for each of the first layers.

    Attributes:
        bytes, seconds: memory and additional time of all these layers.
        choice: choice for the last of these layers; None before the first.
        before: choices for the other layers.
    """

    bytes: float = 0.0
    seconds: float = 0.0
    choice: Choice | None = None
    before: LayerChoices | None = None

    def choices(self) -> list[Choice]:
        """Return the choice of each layer."""
        if self.choice is None or self.before is None:
            return []
        return [*self.before.choices(), self.choice]


def cheapest(layers: Sequence[tuple[Choice, ...]], capacity: float) -> list[Choice] | None:
    """Return the fastest choices for all layers with at most ``capacity`` bytes together, or None."""
    fitting = [chosen for chosen in unbeaten(tuple(layers)) if chosen.bytes <= capacity]
    return fitting[-1].choices() if fitting else None


@lru_cache(maxsize=256)
def unbeaten(layers: tuple[tuple[Choice, ...], ...]) -> tuple[LayerChoices, ...]:
    """Return the choices for all layers that no other choices beat in both memory and time, by ascending bytes."""
    if not layers:
        return (LayerChoices(),)
    before = unbeaten(layers[:-1])
    grown = (
        LayerChoices(previous.bytes + choice.bytes, previous.seconds + choice.seconds, choice, previous)
        for previous in before
        for choice in layers[-1]
    )
    best: list[LayerChoices] = []
    for chosen in sorted(grown, key=lambda choices: (choices.bytes, choices.seconds)):
        if not best or chosen.seconds < best[-1].seconds:
            best.append(chosen)
    return tuple(best)


def fewest_recomputed(setup: Setup) -> int | None:
    """Return the smallest number of recomputed layers of each stage with which full micro-batches fit, or None.

    Megatron recomputes equally many layers on all stages, so the stage with the largest need decides.

    Args:
        setup: setup without recomputation and slices.
    """
    memory, cost = stage_memory(setup), setup.cost
    kept, again_bytes = memory.layer.activations, input_bytes(setup)
    choices = Choice(kept, 0.0), Choice(again_bytes, cost.forward.b)
    again = memory.recomputing(again_bytes)
    most = 0
    for stage, (layers, tokens) in enumerate(zip(memory.num_layers, tokens_in_flight(setup), strict=True)):
        left = setup.budget.device_bytes - memory.state_bytes[stage]
        if layers * kept * tokens <= left - memory.working_bytes[stage]:
            continue
        chosen = cheapest((choices,) * layers, (left - again.working_bytes[stage]) / tokens - again.layer.angles)
        if chosen is None:
            return None
        most = max(most, chosen.count(choices[1]))
    return most
