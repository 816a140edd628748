"""Fused operators of a layer, and the additional bytes that unfused operators save for the backward pass.

``plan/activation/tensors.py`` lists the tensors that a layer saves if norms, rotary embeddings and the activation
function are single (fused) kernels, which save only their input. If they consist of several torch operators, they also
save intermediate results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FLOAT_BYTES: Final = 4
"""Bytes per token of the statistics of an unfused norm, which computes in float32."""


@dataclass(frozen=True, slots=True)
class LayerOperators:
    """Implementation of a layer's operators. The default is fused kernels that save nothing in addition.

    Attributes:
        joined_norms: whether a norm and the matrix product after it are one module (TransformerEngine).
        split_norms: whether a norm consists of several operators, as torch's RMSNorm does on CPU.
        split_activation: whether the activation function of the MLP consists of several operators.
        angles: number of rotary angles per token; 0 without rotary embeddings.
        split_angles: whether rotary embeddings consist of several operators, which save cosines and sines for queries
            and for keys.
        qk_norms: whether queries and keys are normalized.
        mask_bytes: bytes of one element of the hidden dropout mask; 0 without dropout.
    """

    joined_norms: bool = False
    split_norms: bool = False
    split_activation: bool = False
    angles: int = 0
    split_angles: bool = False
    qk_norms: bool = False
    mask_bytes: int = 0

    @property
    def angle_bytes(self) -> float:
        """Bytes of a token's rotary angles, in float32. All layers of a stage use the same angles."""
        return float(FLOAT_BYTES * self.angles)

    def norm_bytes(self, numbers: float, element_bytes: int) -> float:
        """Return the bytes per token that a norm over ``numbers`` elements saves in addition to its input.

        A fused kernel saves only a few bytes of statistics, which are ignored. Unfused operators save the normalized
        input in float32, the input in float32 instead of its original type, and the statistics.
        """
        if not self.split_norms:
            return 0.0
        converted = FLOAT_BYTES - element_bytes if element_bytes < FLOAT_BYTES else 0
        return numbers * (FLOAT_BYTES + converted) + FLOAT_BYTES


FUSED: Final = LayerOperators()
