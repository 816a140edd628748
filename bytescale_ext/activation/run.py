"""The two runs of a layer under an activation policy: the forward pass, and a second run that recomputes dropped rows.

The *hook points* of a layer are attention and the modules that multiply by a weight matrix. Only cheap, token-wise
operations are between them. Each hook point calls the current run. The last hook point is the second product of the MLP
or the layer of experts. Autograd handles everything after it, and the second run ends there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from bytescale_ext.activation.record import LayerRecord, SavedTensor
from bytescale_ext.activation.region import is_sample_major, memory_order

LAYER_INPUT = "layer input"
ATTENTION_OUTPUT = "attention output"

Product = tuple[torch.Tensor, torch.Tensor | None]  # output of a module that multiplies by its weight, and its bias


class RebuiltAll(Exception):  # not an error: it ends the second run of a layer
    """Raised at the last hook point, when all tensors that the backward pass needs are recomputed."""


class LayerRun(Protocol):
    """The functions that hook points call in place of their module's ``forward``."""

    def product(
        self,
        name: str,
        module: torch.nn.Module,
        forward: Callable[..., Product],
        inputs: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> Product:
        """Run a module that multiplies by its weight: (input [rows, ...]) -> (output [rows, ...], bias or None)."""
        ...

    def attention(self, forward: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        """Run core attention: (query, key, value, ...) -> output, all [rows, ...]."""
        ...

    def last[Result](
        self, forward: Callable[..., Result], inputs: torch.Tensor, *args: object, **kwargs: object
    ) -> Result:
        """Run the last hook point: (input [rows, ...]) -> anything."""
        ...


class Recording:
    """The forward pass of a layer, whose saved tensors go to a record."""

    def __init__(self, record: LayerRecord) -> None:
        self.record = record
        self._save: Callable[[torch.Tensor], SavedTensor] = record.save_between
        self._delayed: list[tuple[SavedTensor, torch.Tensor]] = []

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Let the record keep all tensors that autograd saves. If the forward pass fails, the record drops them."""
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda saved: saved.restore()):
            try:
                yield
            except BaseException:
                self.record.abandon()
                raise

    def pack(self, tensor: torch.Tensor) -> SavedTensor:
        """Return the object that autograd keeps in place of a tensor of any shape."""
        return self._save(tensor)

    @contextlib.contextmanager
    def _saving(self, save: Callable[[torch.Tensor], SavedTensor]) -> Iterator[None]:
        before, self._save = self._save, save
        try:
            yield
        finally:
            self._save = before

    def product(
        self,
        name: str,
        module: torch.nn.Module,
        forward: Callable[..., Product],
        inputs: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> Product:
        """See ``LayerRun`` for shapes. Tensors that the module saves are of kind "input", except input and weight."""
        self.record.pass_hook_point(name, inputs, "token")
        with self._saving(lambda tensor: self.record.save_inside(tensor, "input")):
            output, bias = forward(inputs, *args, **kwargs)
        self.record.biases[name] = bias
        if self.record.plan.rebuild_cheap:
            self.record.pass_hook_point(f"{name} output", output, "product")
        return output, bias

    def attention(self, forward: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        """See ``LayerRun`` for shapes. Saved tensors that are no larger than the output are of kind "input"."""
        for name, tensor in zip(("query", "key", "value"), args, strict=False):
            assert isinstance(tensor, torch.Tensor)
            self.record.pass_hook_point(name, tensor, "token")
        with self._saving(self._save_later):
            output = forward(*args, **kwargs)
        if memory_order(output)[0] and not is_sample_major(output):
            output = output.contiguous()
        self.record.pass_hook_point(ATTENTION_OUTPUT, output, "input")
        for saved, tensor in self._delayed:
            kind = "input" if tensor.numel() <= output.numel() else ""
            saved.become(self.record.save_inside(tensor, kind))  # autograd already references ``saved``
        self._delayed.clear()
        return output

    def _save_later(self, tensor: torch.Tensor) -> SavedTensor:
        """Delay the saving of a tensor until the output of attention is known."""
        self._delayed.append((SavedTensor(), tensor))
        return self._delayed[-1][0]

    def last[Result](
        self, forward: Callable[..., Result], inputs: torch.Tensor, *args: object, **kwargs: object
    ) -> Result:
        """See ``LayerRun`` for shapes."""
        self.record.pass_hook_point("last", inputs, "token")
        self._save = self.record.save_inside
        return forward(inputs, *args, **kwargs)


class Rebuilding:
    """The second run of a layer, for dropped rows only. It skips attention and ends at the last hook point."""

    def __init__(self, record: LayerRecord) -> None:
        self.record = record

    def pack(self, tensor: torch.Tensor) -> None:
        """Give a tensor of any shape to the record. Autograd keeps nothing, because no backward pass follows."""
        self.record.rebuild_between(tensor)

    def product(
        self,
        name: str,
        module: torch.nn.Module,
        forward: Callable[..., Product],
        inputs: torch.Tensor,
        *args: object,
        **kwargs: object,
    ) -> Product:
        """See ``LayerRun`` for shapes. Multiplies only the dropped rows."""
        record = self.record
        record.rebuild_hook_point(name, inputs)

        def compute(first: int) -> torch.Tensor:
            repeats = record.hook_points[name].view.sizes[0] // record.split.total
            rows = inputs
            if first:
                rows = inputs[first:] if repeats == 1 else inputs.unflatten(0, (repeats, -1))[:, first:].flatten(0, 1)
            with torch.no_grad():
                output = forward(rows, *args, **kwargs)[0]
            num_rows = max(rows.numel() // rows.shape[-1], output.numel() // output.shape[-1])
            assert isinstance(module.weight, torch.Tensor), f"{name}: {module}"
            record.counts.recomputed_flops += 2 * module.weight.numel() * num_rows
            return output

        output = record.product(f"{name} output", compute) if record.plan.rebuild_cheap else compute(0)
        return output.detach().requires_grad_(), record.biases[name]

    def attention(self, forward: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        """See ``LayerRun`` for shapes. Returns the stored output, without computation and communication."""
        record = self.record
        for name, tensor in zip(("query", "key", "value"), args, strict=False):
            assert isinstance(tensor, torch.Tensor)
            record.rebuild_hook_point(name, tensor)
        return record.rows_from(ATTENTION_OUTPUT, record.first_row).detach().requires_grad_()

    def last[Result](
        self, forward: Callable[..., Result], inputs: torch.Tensor, *args: object, **kwargs: object
    ) -> Result:
        """See ``LayerRun`` for shapes. Raises ``RebuiltAll``."""
        self.record.rebuild_hook_point("last", inputs)
        raise RebuiltAll
