"""Which layers of a stage keep their activations and which are computed again: least time within the memory.

Galvatron (Miao et al. 2022, section 3.3) chooses for one layer after the other and keeps the fastest choice for each
amount of memory. Here memory is not in steps: of the choices for the first layers those stay that no other choice beats
in memory and time, so the result is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from bytescale_ext.plan.cost.cost_model import StageCost
from bytescale_ext.plan.cost.model_cost import ModelCost
from bytescale_ext.plan.memory.stage_memory import StageMemory
from bytescale_ext.plan.schedule.actions import most_slices
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.step.sizes import ONE_SLICE


@dataclass(frozen=True, slots=True)
class Choice:
    """What a layer may do.

    Attributes:
        bytes: that it holds until its backward pass.
        seconds: that it takes longer.
    """

    bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Chosen:
    """A choice for each of the first layers.

    Attributes:
        bytes, seconds: of all together.
        choice: of the last of these layers; None before the first.
        before: of the others.
    """

    bytes: float = 0.0
    seconds: float = 0.0
    choice: Choice | None = None
    before: Chosen | None = None

    def choices(self) -> list[Choice]:
        """Return the choice of each layer."""
        if self.choice is None or self.before is None:
            return []
        return [*self.before.choices(), self.choice]


def cheapest(layers: Sequence[tuple[Choice, ...]], capacity: float) -> list[Choice] | None:
    """Return a choice for each layer that together hold at most ``capacity`` bytes and take least time, or None."""
    fitting = [chosen for chosen in unbeaten(tuple(layers)) if chosen.bytes <= capacity]
    return fitting[-1].choices() if fitting else None


@lru_cache(maxsize=256)
def unbeaten(layers: tuple[tuple[Choice, ...], ...]) -> tuple[Chosen, ...]:
    """Return the choices for all layers that no others beat in memory and time, by ascending bytes."""
    if not layers:
        return (Chosen(),)
    before = unbeaten(layers[:-1])
    grown = (Chosen(one.bytes + of.bytes, one.seconds + of.seconds, of, one) for one in before for of in layers[-1])
    found: list[Chosen] = []
    for chosen in sorted(grown, key=lambda one: (one.bytes, one.seconds)):
        if not found or chosen.seconds < found[-1].seconds:
            found.append(chosen)
    return tuple(found)


def fewest_recomputed(cost: ModelCost, memory: StageMemory, strategy: Strategy, device_bytes: float) -> int | None:
    """Return how many layers of each stage must be computed again for full micro-batches to fit, or None.

    Megatron recomputes equally many layers on all stages, so the stage that needs most decides.

    Args:
        cost, memory: of the strategy with all activations kept.
        strategy: its micro-batches run whole.
        device_bytes: of a device.
    """
    choices = Choice(cost.layer_bytes, 0.0), Choice(cost.recompute_bytes, cost.forward.b)
    again = memory.recomputing(choices[1].bytes)
    most = 0
    for stage, (layers, tokens) in enumerate(zip(memory.num_layers, tokens_in_flight(strategy), strict=True)):
        left = device_bytes - memory.state_bytes[stage]
        if layers * choices[0].bytes * tokens <= left - memory.working_bytes[stage]:
            continue
        found = cheapest((choices,) * layers, (left - again.working_bytes[stage]) / tokens - again.layer.angles)
        if found is None:
            return None
        most = max(most, found.count(choices[1]))
    return most


def block_bytes(cost: ModelCost, memory: StageMemory, strategy: Strategy) -> float:
    """Return the most bytes of a device that runs full micro-batches whole; see ``fewest_recomputed``."""
    again, layer_bytes = memory.recomputing(cost.recompute_bytes), []
    for layers, tokens in zip(memory.num_layers, tokens_in_flight(strategy), strict=True):
        share = min(layers, strategy.recomputed_layers) / layers
        kept = share * cost.recompute_bytes + (1 - share) * cost.layer_bytes
        layer_bytes.append(tokens * (kept + again.layer.angles / layers))
    return again.most_bytes(layer_bytes)


def tokens_in_flight(strategy: Strategy) -> list[int]:
    """Return the tokens whose activations each stage holds at most, in full micro-batches that run whole."""
    stages = range(strategy.num_stages)
    return [most_slices(strategy.num_stages, ONE_SLICE, one) * strategy.tokens_per_rank for one in stages]


def computed_again(stage: StageCost, cost: ModelCost, num_layers: int) -> StageCost:
    """Return the cost of a stage of which so many layers are computed again."""
    return replace(stage, backward=stage.backward + cost.forward.scaled(num_layers))
