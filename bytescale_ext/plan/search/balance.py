"""Layers of pipeline stages that end together: the time and memory of a stage decide its number of layers.

Galvatron-BMW (Wang et al. 2024) starts from stages that are equal in memory and moves layers at their borders off the
slowest stage, as long as memory allows and the slowest stage gets faster. Its public code has only equal stages, so
this follows the paper's description. If all layers are equal, a layer may move to any stage, because all borders in
between move with it. Then no partition that fits the memory is faster than the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

OfLayers = Callable[[int, int], float]
"""Function from (stage, layers) to seconds or bytes, which grows with the number of layers."""


def balanced_layers(
    num_layers: int, num_stages: int, seconds: OfLayers, most_layers: Sequence[int]
) -> list[int] | None:
    """Return the layers of each stage that make the slowest stage fastest, or None if they do not fit.

    Args:
        num_layers: number of layers, at least one for each stage.
        num_stages: number of stages.
        seconds: time of a stage.
        most_layers: largest number of layers that fits the memory of each stage.
    """
    layers = level_layers(num_layers, num_stages, lambda stage, count: count / max(1, most_layers[stage]))
    if any(count > most for count, most in zip(layers, most_layers, strict=True)):
        return None
    while True:
        slowest = max(range(num_stages), key=lambda stage: seconds(stage, layers[stage]))
        limit = seconds(slowest, layers[slowest])
        takers = [
            (seconds(stage, layers[stage] + 1), stage)
            for stage in range(num_stages)
            if stage != slowest and layers[stage] < most_layers[stage] and seconds(stage, layers[stage] + 1) < limit
        ]
        if not takers or layers[slowest] == 1:
            return layers
        layers[slowest] -= 1
        layers[min(takers)[1]] += 1


def level_layers(num_layers: int, num_stages: int, load: OfLayers) -> list[int]:
    """Return the layers of each stage, at least one.

    Each layer is given to the stage with the smallest resulting load.
    """
    layers = [1] * num_stages
    for _ in range(num_layers - num_stages):
        least = min(range(num_stages), key=lambda stage: load(stage, layers[stage] + 1))
        layers[least] += 1
    return layers
