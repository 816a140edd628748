"""What decides the names of a model's tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """What decides the names of a model's tensors.

    Attributes:
        num_layers: layers.
        num_groups: key and value heads.
        head_dim: of a head.
        is_tied: the output layer is the embedding.
        qkv_bias: queries, keys and values have biases.
        qk_norm: queries and keys have norms.
        num_experts: of each layer; 0: dense.
        router: the router's name in a Hugging Face layer.
        experts: the experts' name in it, with places for the number of an expert and the name of a product.
        products: names of gate, up and down in an MLP or expert.
    """

    num_layers: int
    num_groups: int
    head_dim: int
    is_tied: bool
    qkv_bias: bool
    qk_norm: bool
    num_experts: int = 0
    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}.{}"
    products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
