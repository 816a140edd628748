"""Choices of a GPT model, as values of the reference model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

HEADS = 4
HIDDEN = 32
ROWS = 128
"""Rows of the embedding: the tokens and padding up to a multiple of 128."""


@dataclass(frozen=True)
class Yarn:
    """Frequencies that YaRN stretches (YaRN, sections 3.2 to 3.4).

    Attributes:
        factor: length of the new context over the length of the old one.
        original_length: tokens of the old context.
        fast, slow: rotations over the old context above which a frequency is kept, and below which it is divided.
        is_rounded: whether the bounds between kept and divided frequencies are whole numbers.
        scale, scale_all: factors of the logarithm in the temperature, of rotated and of all components.
    """

    factor: float
    original_length: int
    fast: float = 32.0
    slow: float = 1.0
    is_rounded: bool = True
    scale: float | None = None
    scale_all: float | None = None


@dataclass(frozen=True)
class Positions:
    """Positions of tokens.

    Attributes:
        kind: rotary, learned or none.
        base: longest wavelength over 2 pi.
        share: share of a head's components that are rotated.
        interleaved: whether neighbouring components form a pair, instead of components of two halves.
        interpolation: divisor of positions.
        llama_factor: divisor of low frequencies in Llama 3, or None.
        without: layers without rotation, from 0.
    """

    kind: Literal["rotary", "learned", "none"] = "rotary"
    base: float = 10000.0
    share: float = 1.0
    interleaved: bool = False
    interpolation: float = 1.0
    llama_factor: float | None = None
    yarn: Yarn | None = None
    without: tuple[int, ...] = ()


@dataclass(frozen=True)
class Latent:
    """Sizes of multi-head latent attention (DeepSeek-V2, section 2.1).

    Attributes:
        query_rank: numbers in the latent of a query, or None for queries without a latent.
        rank: numbers in the latent of keys and values.
        plain, rotated, value: components of a head that are not rotated, are rotated, and of its value.
    """

    query_rank: int | None
    rank: int
    plain: int
    rotated: int
    value: int


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the layers ``layers``.

    Attributes:
        score: function of the router's scores; softmax "after" or "before" the choice of experts, or sigmoid.
        bias_rate: change of the bias that only the choice sees, per step (DeepSeek-V3, section 2.1.2), or None.
        groups: (number of groups, chosen groups), or None.
        document_loss: coefficient of the balancing loss of each document (DeepSeek-V3, section 2.1.2).
        step_loss: coefficient of the balancing loss with the choices of the step before.
        z_loss: coefficient of the squared log-sum-exp of the router's scores (ST-MoE, equation 5).
        shared: width of the shared expert, or None.
        is_shared_gated: whether a sigmoid scales the shared expert.
        latent: numbers of a token at its experts, between projections from and to the hidden state; None: all.
    """

    count: int = 4
    chosen: int = 2
    width: int = 24
    layers: tuple[int, ...] = (1,)
    score: Literal["after", "before", "sigmoid"] = "after"
    scaling: float = 1.0
    bias_rate: float | None = None
    groups: tuple[int, int] | None = None
    document_loss: float = 0.0
    step_loss: float = 0.0
    z_loss: float = 0.0
    shared: int | None = None
    is_shared_gated: bool = False
    latent: int | None = None


@dataclass(frozen=True)
class Clip:
    """Clipping of queries and keys after each step (QK-clip, Kimi K2, section 2.1).

    Attributes:
        threshold: largest allowed score of a head.
        alpha: exponent of the part that queries take.
    """

    threshold: float
    alpha: float = 0.5


@dataclass(frozen=True)
class Settings:
    """A model.

    Attributes:
        key_heads: heads of keys and values, each shared by a group of query heads.
        windows: tokens before a token that it attends to, per layer; None for all.
        sink: one more score in each softmax: none, zero, or a parameter.
        has_biases: whether linear layers have biases; ``has_qkv_bias`` adds one to queries, keys and values only.
        only_answers: whether only tokens of answers have a loss.
        depths: depths of multi-token prediction (DeepSeek-V3, section 2.2), with ``depth_weight`` in all.
        clip: clipping of queries and keys, or None.
    """

    layers: int = 2
    key_heads: int = 2
    head_size: int = HIDDEN // HEADS
    width: int = 48
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["swiglu", "gelu", "squared_relu"] = "swiglu"
    has_biases: bool = False
    has_qkv_bias: bool = False
    is_tied: bool = False
    has_qk_norm: bool = False
    positions: Positions = field(default_factory=Positions)
    length: int = 256
    windows: tuple[int | None, ...] = (None, None)
    sink: Literal["none", "zero", "learned"] = "none"
    latent: Latent | None = None
    experts: Experts | None = None
    only_answers: bool = False
    depths: int = 0
    depth_weight: float = 0.0
    clip: Clip | None = None
