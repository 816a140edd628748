"""Layers of experts that read and write latents (``--moe-latent-size``), without TransformerEngine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.bytescale.core.tensor_parallel.layers import DuplicatedLinear


class LatentMoELayer(MoELayer):
    """Megatron's layer of experts. In local layers, the projections of latents are modules of torch.

    The down-projection maps the hidden state of a token to its latent before the dispatch, and the up-projection maps
    the sum of its experts' outputs back. Megatron makes both from TransformerEngine, also in local layers. Names in
    checkpoints are Megatron's.
    """

    def __init__(self, config: TransformerConfig, submodules: MoESubmodules, *args: object, **kwargs: object) -> None:
        if not config.moe_latent_size or config.transformer_impl != "local":
            super().__init__(config, submodules, *args, **kwargs)
            return
        with _without_projections(config, submodules) as changed:
            super().__init__(config, changed, *args, **kwargs)
        hidden, latent = config.hidden_size, config.moe_latent_size
        self.fc1_latent_proj = DuplicatedLinear(hidden, latent, config, config.init_method)
        self.fc2_latent_proj = DuplicatedLinear(latent, hidden, config, config.output_layer_init_method)


@contextmanager
def _without_projections(config: TransformerConfig, submodules: MoESubmodules) -> Iterator[MoESubmodules]:
    """Let Megatron build a layer without projections. Only the experts of the returned modules see the latents' size.

    ``config`` has another size meanwhile: Megatron's modules must keep this very object, which changes later.
    """
    latent = config.moe_latent_size

    def experts(*args: object, **kwargs: object) -> torch.nn.Module:
        config.moe_latent_size = latent
        return submodules.experts(*args, **kwargs)

    config.moe_latent_size = None
    try:
        yield replace(submodules, experts=experts)
    finally:
        config.moe_latent_size = latent
