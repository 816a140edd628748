"""The properties of a model that decide the names and layouts of its tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckpointLayout:
    """The properties of a model that decide the names and layouts of its tensors.

    Attributes:
        num_layers: number of layers.
        num_groups: number of key and value heads.
        head_dim: size of a head.
        is_tied: whether the output layer shares the weight of the embedding.
        qkv_bias: whether the projections of queries, keys and values have biases.
        qk_norm: whether queries and keys have norms.
        proj_bias: whether the router and the projection after attention have biases.
        has_sinks: whether each head has an attention sink.
        latent: kind of latent attention: "" without, "keys" for latents of keys and values only, "queries" for latents
            of queries as well.
        num_experts: experts per layer; 0 for a dense model.
        num_dense: number of dense layers at the start of a model with experts.
        has_shared: whether layers with experts also have shared experts.
        has_expert_bias: whether a bias for each expert is added to the router's scores for the choice only.
        is_stacked: whether the experts of a layer are stacked in tensors [experts, inputs, outputs] with biases. The
            outputs of gate and up alternate in such a tensor.
        router: name of the router in a Hugging Face layer.
        experts: name of an expert's product in a Hugging Face layer, with placeholders for expert and product.
        products: names of the gate, up and down projections of an MLP or expert.
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
    has_expert_bias: bool = False
    is_stacked: bool = False
    router: str = "mlp.gate"
    experts: str = "mlp.experts.{}.{}"
    products: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
