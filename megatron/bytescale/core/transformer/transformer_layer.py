"""Megatron's transformer layer under an activation policy that keeps, swaps or recomputes its saved tensors.

The layer runs Megatron's own forward. The layer spec builds the modules at its *hook points* (attention and the modules
that multiply matrices) as subclasses with a ``HookPoint``, where a run of ``bytescale_ext.activation.run`` intervenes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from bytescale_ext.activation.record import LayerRecord
from bytescale_ext.activation.region import memory_order
from bytescale_ext.activation.run import LAYER_INPUT, LayerRun, Rebuilding, RebuiltAll, Recording
from bytescale_ext.activation.store import ActivationStore
from megatron.bytescale.core.packed_seq_params import DocumentSeqParams
from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention
from megatron.bytescale.core.transformer.multi_latent_attention import DocumentLatentAttention, DocumentLatentCore
from megatron.bytescale.core.transformer.spec_utils import has_experts

if TYPE_CHECKING:
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.module import MegatronModule

ModuleBuilder = type | partial[torch.nn.Module]
"""Entry of a layer spec: a class, or a class with some of its arguments."""


class HookPoint(torch.nn.Module):
    """Mixin for a module's class: once ``hook`` is set, calls ``hook(forward, *args, **kwargs)`` as the forward."""

    hook: Callable[..., object] | None = None

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module, through its hook if set."""
        if self.hook is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        return self.hook(super().forward, *args, **kwargs)  # type: ignore[misc]


@functools.cache
def _class_with_hook_point(module: type) -> type:
    return type(module.__name__, (HookPoint, module), {})


def with_hook_point(builder: ModuleBuilder) -> ModuleBuilder:
    """Return a layer spec entry (class or ``partial``) that builds the same module with a hook point."""
    if isinstance(builder, partial):
        return partial(_class_with_hook_point(builder.func), *builder.args, **builder.keywords)  # type: ignore[arg-type]
    return _class_with_hook_point(builder)


class PlannedTransformerLayer(TransformerLayer):
    """Megatron's layer; the plan of ``activations`` keeps, swaps or rebuilds its saved tensors.

    Rebuilding runs Megatron's own forward again, without attention. It repeats the collectives of tensor parallelism
    but not the communication of rings. All ranks of a tensor-parallel group must have equal plans.
    """

    def __init__(self, *args: object, activations: ActivationStore, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.activations = activations
        self.run_as(self.layer_number)
        self._run: LayerRun | None = None
        self._with_parameters: tuple[torch.nn.Module, ...] = ()  # modules with parameters of their own, once it ran
        attention = self.self_attention
        for name in products_of(attention):
            self._set_hook(getattr(attention, name), "product", name.removeprefix("linear_"))
        self._set_hook(attention.core_attention, "attention")
        if self.is_moe_layer:  # policies do not cover experts
            self._set_hook(self.mlp, "last")
        elif not isinstance(self.mlp, IdentityOp):
            self._set_hook(self.mlp.linear_fc1, "product", "fc1")
            self._set_hook(self.mlp.linear_fc2, "last")

    def run_as(self, number: int) -> None:
        """Set this layer's index in the order of swaps and reads."""
        self._number = number
        self.activations.add_layer(number)

    def _set_hook(self, module: torch.nn.Module, method: str, name: str | None = None) -> None:
        """Replace the module's forward with ``method`` of the layer's current run while there is a run."""
        # The attention of samples side by side saves copies of queries, keys and values that are not sample by sample.
        saves_copies = isinstance(module, DocumentAttention) and not isinstance(module, DocumentLatentCore)

        def hook(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
            if self._run is None:
                return forward(*args, **kwargs)
            if saves_copies:
                args = tuple(_sample_major(cast("torch.Tensor", tensor)) for tensor in args[:3]) + args[3:]
            first = (forward,) if name is None else (name, module, forward)
            return getattr(self._run, method)(*first, *args, **kwargs)

        if isinstance(module, HookPoint | DocumentLatentCore):
            module.hook = hook
        else:  # a product of latent attention, which compares the classes of its spec
            module.forward = partial(hook, module.forward)

    def forward(
        self, hidden_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Map hidden states [rows, b, h] to (output [rows, b, h], context), like Megatron's layer."""
        is_frozen = not hidden_states.requires_grad and not any(weight.requires_grad for weight in self.parameters())
        if not self.training or not torch.is_grad_enabled() or is_frozen:  # no tensors are saved
            return super().forward(hidden_states, *args, **kwargs)
        if not self.activations.is_planned(self._number):
            return self._forward_resident(hidden_states, *args, **kwargs)
        assert not args, f"{len(args)=}"
        if memory_order(hidden_states)[0] != 0:
            hidden_states = hidden_states.contiguous()
        if not self._with_parameters:
            self._with_parameters = tuple(module for module in self.modules() if module._parameters)
        parameters = frozenset(
            parameter.untyped_storage().data_ptr()
            for module in self._with_parameters
            for parameter in module._parameters.values()
            if parameter is not None
        )
        record = self.activations.new_record(self._number, hidden_states.shape[0], parameters)
        record.pass_hook_point(LAYER_INPUT, hidden_states, "input")
        run = Recording(record)
        with self._running(run), run.saving():
            result = super().forward(hidden_states, **kwargs)
        record.rebuild = partial(self._rebuild, kwargs)
        record.close()
        return result

    def _forward_resident(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run a layer that keeps all tensors. Its backward pass starts to read the layer that runs backward next."""
        read_next = self.activations.before_resident(self._number)
        result = super().forward(*args, **kwargs)
        if read_next is not None and result[0].requires_grad:
            result[0].register_hook(lambda gradient: read_next())
        return result

    @contextlib.contextmanager
    def _running(self, run: LayerRun) -> Iterator[None]:
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def _rebuild(self, kwargs: Mapping[str, Any], record: LayerRecord) -> None:
        """Run the token-wise operations again for the rows from ``record.first_row`` on."""
        first = record.first_row
        inputs = record.rows_from(LAYER_INPUT, first).detach().requires_grad_()
        positions = kwargs.get("rotary_pos_emb")
        if isinstance(positions, tuple):
            positions = tuple(_rows_from(part, record.split.total, first) for part in positions)
        else:
            positions = _rows_from(positions, record.split.total, first)
        kwargs = {**kwargs, "rotary_pos_emb": positions, "attention_mask": None}
        params = kwargs.get("packed_seq_params")
        if isinstance(params, DocumentSeqParams):  # latent attention computes its own angles
            params = copy.copy(params)
            params.positions = _rows_from(params.positions, record.split.total, first)
            kwargs["packed_seq_params"] = params
        run = Rebuilding(record)
        hooks = torch.autograd.graph.saved_tensors_hooks(run.pack, lambda nothing: nothing)
        with self._running(run), torch.enable_grad(), hooks:
            try:
                super().forward(inputs, **kwargs)
            except RebuiltAll:
                return
            finally:
                self.mlp_norm_manager = None  # Megatron resets it at the layer's end, not reached here
        raise AssertionError("a rebuilt layer did not reach its last hook point")


def products_of(attention: Attention) -> list[str]:
    """Return the names of the attention's products that have hooks.

    The up-projection of keys and values in latent attention has none: attention may apply it, and a rebuilt layer runs
    it again like other operations.
    """
    if not isinstance(attention, DocumentLatentAttention):
        return ["linear_qkv", "linear_proj"]
    of_latents = ("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_proj")
    return [name for name in of_latents if getattr(attention, name, None) is not None]


def _sample_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor [rows, samples, ...] with the memory of each sample contiguous."""
    if tensor.shape[1] == 1:
        return tensor.contiguous()
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def _rows_from(positions: torch.Tensor | None, num_rows: int, first: int) -> torch.Tensor | None:
    """Return angles or positions [t, ...] of rows from ``first`` on, for each tensor-parallel rank's ``num_rows``."""
    if positions is None or not first:
        return positions
    return positions.unflatten(0, (-1, num_rows))[:, first:].flatten(0, 1)


def planned_layer_spec(
    spec: ModuleSpec | TransformerBlockSubmodules, activations: ActivationStore
) -> ModuleSpec | TransformerBlockSubmodules:
    """Return a finished layer or block spec that builds each layer as a ``PlannedTransformerLayer``.

    Raises:
        ValueError: the spec contains a layer of another class.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [planned_layer_spec(layer, activations) for layer in spec.layer_specs]
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=spec.layer_norm)
    if spec.module is not TransformerLayer:
        raise ValueError(f"activation policies need Megatron's TransformerLayer, and this model has {spec.module}")
    return ModuleSpec(
        module=PlannedTransformerLayer,
        params={**(spec.params or {}), "activations": activations},
        submodules=_with_hook_points(spec.submodules),
        metainfo=getattr(spec, "metainfo", {}),
    )


def _with_hook_points(layer: TransformerLayerSubmodules) -> TransformerLayerSubmodules:
    """Return the submodules of a layer with hook points at attention and matrix products."""
    attention: Attention = layer.self_attention
    inside = attention.submodules
    if attention.module is not DocumentLatentAttention:  # whose products get hooks once they are built
        names = ("linear_qkv", "core_attention", "linear_proj")
        inside = replace(inside, **{name: with_hook_point(getattr(inside, name)) for name in names})
    mlp: MegatronModule = layer.mlp
    if has_experts(layer):
        mlp = with_hook_point(mlp)
    elif mlp is not IdentityOp:
        dense = mlp.keywords["submodules"]
        dense = replace(
            dense, linear_fc1=with_hook_point(dense.linear_fc1), linear_fc2=with_hook_point(dense.linear_fc2)
        )
        mlp = partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": dense})
    return replace(layer, self_attention=replace(attention, submodules=inside), mlp=mlp)
