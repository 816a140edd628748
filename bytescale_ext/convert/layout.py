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
        proj_bias: the projection after attention and the router have biases.
        has_sinks: each head has an attention sink.
        latent: "": no latent attention; "keys": latents of keys and values alone; "queries": of queries too.
        num_experts: of each layer; 0: dense.
        num_dense: first layers that have no experts.
        has_shared: layers with experts have shared ones beside them.
        is_stacked: the experts of a layer are stacked, [experts, inputs, outputs], with biases; their gates and ups
            alternate.
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
    proj_bias: bool = False
    has_sinks: bool = False
    latent: str = ""
    num_experts: int = 0
    num_dense: int = 0
    has_shared: bool = False
    is_stacked: bool = False
    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}.{}"
    products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
