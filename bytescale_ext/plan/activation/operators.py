"""The fused operators of a layer, and the bytes that the other operators save in addition for the backward pass.

``plan/activation/tensors.py`` lists what a layer saves where norms, rotary embeddings and the activation function are
single (fused) kernels, which save only their input. Made of several operators of torch they save results in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

FLOAT_BYTES: Final = 4
"""Norms of several operators compute in float32 and save one float32 for each token."""


@dataclass(frozen=True, slots=True)
class LayerOperators:
    """Builds of a layer's operators; the default is fused kernels that save nothing more.

    Attributes:
        joined_norms: a norm and the matrix product after it are one module (TransformerEngine).
        split_norms: norms are several operators, as torch's RMSNorm is on CPU.
        split_activation: the activation function of the MLP is several operators.
        angles: numbers of a token's rotary angles; 0 without rotary embeddings.
        split_angles: rotary embeddings are several operators, which save cosines and sines for queries and for keys.
        qk_norms: queries and keys are normed.
        mask_bytes: bytes of one number in the mask of hidden dropout; 0 without dropout.
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
        """Bytes of a token's rotary angles, in float32; all layers of a stage take the same."""
        return float(FLOAT_BYTES * self.angles)

    def norm_bytes(self, numbers: float, element_bytes: int) -> float:
        """Return the bytes that a norm of ``numbers`` for each token saves in addition to its input, for each token.

        One kernel saves statistics of a few bytes, which do not count. Several operators save the normed input in
        float32, the input converted to that, which then is not saved as it came, and the statistics.
        """
        if not self.split_norms:
            return 0.0
        converted = FLOAT_BYTES - element_bytes if element_bytes < FLOAT_BYTES else 0
        return numbers * (FLOAT_BYTES + converted) + FLOAT_BYTES


FUSED: Final = LayerOperators()
