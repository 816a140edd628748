"""The models and the loss chunk that the GPU benches of activations share."""

from __future__ import annotations

from typing import Final

from bytescale_ext.plan.cost.model_shape import ModelShape

SHAPE: Final = ModelShape(8, 4096, 32, 32, 128, 11008, True, 32000)
"""8 layers of the width of a 7B model."""

TINY: Final = ModelShape(4, 64, 2, 2, 32, 128, True, 256)
LOSS_TOKENS: Final = 4096
