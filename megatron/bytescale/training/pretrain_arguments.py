"""The arguments of Megatron's ``pretrain``, as a value that features modify, starting from stock training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.training.argument_utils import pretrain_cfg_container_from_args
from megatron.training.config.container import PretrainConfigContainer
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.bytescale.arguments.bad_input import refusals_of_megatron
from megatron.bytescale.arguments.model_config import model_config
from megatron.bytescale.training import stock
from megatron.bytescale.training.stock import DatasetProvider, ForwardStep

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime

Function = Callable[..., object]
type LayerSpec = ModuleSpec | TransformerBlockSubmodules
"""Layer specs of a pipeline stage, as Megatron builds them."""


@dataclass(frozen=True)
class Training:
    """The arguments of ``pretrain``. Features change the model's configuration and return new functions.

    Attributes:
        model: Megatron's configuration of the model: layer spec, hooks before DDP, function that finalizes gradients.
        dataset_provider: function for ``train_valid_test_datasets_provider``.
        forward_step: function for ``forward_step_func``.
    """

    model: GPTModelConfig
    dataset_provider: DatasetProvider
    forward_step: ForwardStep

    def wrap_layer_spec(self, wrap: Callable[[LayerSpec], LayerSpec]) -> Training:
        """Change the layer spec of each pipeline stage: ``wrap`` takes the current spec and returns the new spec."""
        made = self.model.transformer_layer_spec or default_layer_spec

        def layer_spec(config: GPTModelConfig, vp_stage: int | None = None) -> LayerSpec:
            spec: LayerSpec = made(config, vp_stage) if callable(made) and not hasattr(made, "submodules") else made
            return wrap(spec)

        self.model.transformer_layer_spec = layer_spec
        return self

    def wrap_all_layer_specs(self, wrap: Callable[[LayerSpec], LayerSpec], runtime: Runtime) -> Training:
        """Change the specs of all layers, also under HDP the separate specs of multi-token prediction."""
        runtime.add_parts(layer_specs=(*runtime.parts.layer_specs, wrap))
        return self.wrap_layer_spec(wrap)

    def wrap_finalize(self, wrap: Callable[[Function], Function]) -> Training:
        """Wrap the function that runs once per step, after the last backward pass."""
        transformer = self.model.transformer
        transformer.finalize_model_grads_func = wrap(transformer.finalize_model_grads_func or finalize_model_grads)
        return self

    def wrap_forward_step(self, wrap: Callable[[ForwardStep], ForwardStep]) -> Training:
        """Wrap the function that runs one micro-batch forward."""
        return replace(self, forward_step=wrap(self.forward_step))


def stock_training(args: Any) -> Training:
    """Return the training without features. Raises ValueError for arguments that Megatron refuses."""
    with refusals_of_megatron():
        model = model_config(args)
    return Training(model, stock.dataset_provider, stock.forward_step)


def pretrain_config(args: Any, model: GPTModelConfig) -> PretrainConfigContainer:
    """Return the configuration of Megatron's ``pretrain``. Raises ValueError for arguments that Megatron refuses."""
    with refusals_of_megatron():
        return pretrain_cfg_container_from_args(args, model)
