"""Megatron's transformer layer under an activation policy: what it remembers is kept, swapped or recomputed."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from bytescale_ext.activation.record import LayerRecord
from bytescale_ext.activation.region import memory_order
from bytescale_ext.activation.run import LAYER_INPUT, Rebuilding, RebuiltAll, Recording, Run
from bytescale_ext.activation.store import ActivationStore
from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention


class PlannedTransformerLayer(TransformerLayer):
    """A layer that runs as Megatron's does, while ``activations`` decides what becomes of the tensors it saves.

    Rebuilding runs Megatron's own forward again, without attention, so it makes the collectives of tensor
    parallelism again and none of a ring. All ranks of a tensor-parallel group must have equal plans.
    """

    def __init__(self, *args: Any, activations: ActivationStore, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.activations = activations
        self._run: Run | None = None
        attention = self.self_attention
        self._set_station(attention.linear_qkv, "product", "qkv")
        self._set_station(attention.core_attention, "attention")
        self._set_station(attention.linear_proj, "product", "proj")
        if self.is_moe_layer:  # experts are left alone
            self._set_station(self.mlp, "last")
        elif not isinstance(self.mlp, IdentityOp):
            self._set_station(self.mlp.linear_fc1, "product", "fc1")
            self._set_station(self.mlp.linear_fc2, "last")

    def _set_station(self, module: torch.nn.Module, kind: str, name: str | None = None) -> None:
        """Let the run that is going on, if any, take the place of a module's forward."""
        forward = module.forward
        first = (forward,) if name is None else (name, module, forward)

        def at_station(*args: Any, **kwargs: Any) -> Any:
            if self._run is None:
                return forward(*args, **kwargs)
            if isinstance(module, DocumentAttention):  # it saves copies of queries, keys and values that are not
                args = tuple(tensor.contiguous() for tensor in args[:3]) + args[3:]
            return getattr(self._run, kind)(*first, *args, **kwargs)

        module.forward = at_station  # type: ignore[method-assign]

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """[rows, b, h] -> (output [rows, b, h], context), as Megatron's layer."""
        if not self.training or not torch.is_grad_enabled():
            return super().forward(hidden_states, *args, **kwargs)
        if not self.activations.is_planned(self.layer_number):
            return self._forward_resident(hidden_states, *args, **kwargs)
        assert not args, f"{len(args)=}"
        if memory_order(hidden_states)[0] != 0:
            hidden_states = hidden_states.contiguous()
        parameters = frozenset(p.untyped_storage().data_ptr() for p in self.parameters())
        record = self.activations.new_record(self.layer_number, hidden_states.shape[0], parameters)
        record.pass_station(LAYER_INPUT, hidden_states, "input")
        run = Recording(record)
        with self._running(run), torch.autograd.graph.saved_tensors_hooks(run.pack, lambda slip: slip.redeem()):
            result = super().forward(hidden_states, **kwargs)
        record.rebuild = partial(self._rebuild, kwargs)
        record.close()
        return result

    def _forward_resident(self, *args: Any, **kwargs: Any) -> Any:
        """A layer of which everything is kept; the layer before is read back while its backward pass runs."""
        record = self.activations.before_resident(self.layer_number)
        result = super().forward(*args, **kwargs)
        if record is not None and result[0].requires_grad:
            before = weakref.ref(record)
            result[0].register_hook(lambda gradient: _prefetch(before()))
        return result

    @contextlib.contextmanager
    def _running(self, run: Run) -> Iterator[None]:
        self._run = run
        try:
            yield
        finally:
            self._run = None

    def _rebuild(self, kwargs: dict[str, Any], record: LayerRecord) -> None:
        """Run the token-wise parts again for the rows from ``record.first_row`` on."""
        first = record.first_row
        inputs = record.rows_from(record.stations[LAYER_INPUT], first).detach().requires_grad_()
        positions = kwargs.get("rotary_pos_emb")
        if isinstance(positions, tuple):
            positions = tuple(_rows_from(one, record.split.total, first) for one in positions)
        else:
            positions = _rows_from(positions, record.split.total, first)
        kwargs = {**kwargs, "rotary_pos_emb": positions, "attention_mask": None}
        run = Rebuilding(record)
        hooks = torch.autograd.graph.saved_tensors_hooks(run.pack, lambda nothing: nothing)
        with self._running(run), torch.enable_grad(), hooks:
            try:
                super().forward(inputs, **kwargs)
            except RebuiltAll:
                return
            finally:
                self.mlp_norm_manager = None  # Megatron's layer drops it where it ends, which this run does not reach
        raise AssertionError("a layer was run again and did not reach its last station")


def _prefetch(record: LayerRecord | None) -> None:
    """Begin to read a layer back, if it is still there."""
    if record is not None:
        record.prefetch()


def _rows_from(positions: torch.Tensor | None, num_rows: int, first: int) -> torch.Tensor | None:
    """The rotary embedding [t, 1, 1, dim] from row ``first`` on, of each tensor-parallel rank's ``num_rows``."""
    if positions is None or not first:
        return positions
    return positions.unflatten(0, (-1, num_rows))[:, first:].flatten(0, 1)


def planned_layer_spec(
    spec: ModuleSpec | TransformerBlockSubmodules, activations: ActivationStore
) -> ModuleSpec | TransformerBlockSubmodules:
    """A finished layer spec, or spec of a block, with each of Megatron's layers as a ``PlannedTransformerLayer``.

    Raises:
        ValueError: a layer of another class.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [planned_layer_spec(layer, activations) for layer in spec.layer_specs]
        return TransformerBlockSubmodules(layer_specs=layers, layer_norm=spec.layer_norm)
    if spec.module is not TransformerLayer:
        raise ValueError(f"activation policies need Megatron's TransformerLayer, and this model has {spec.module}")
    return ModuleSpec(
        module=PlannedTransformerLayer,
        params={**(spec.params or {}), "activations": activations},
        submodules=spec.submodules,
        metainfo=getattr(spec, "metainfo", {}),
    )
