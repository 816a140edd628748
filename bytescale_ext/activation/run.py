"""The two runs of a layer under an activation policy: forward with a record, and again to rebuild dropped rows.

A layer's *hook points* are the modules that multiply matrices, and attention; only cheap, token-wise operations lie
between them. Each hook point calls the current run. The last one is the MLP's second product, or the layer of experts:
autograd handles everything after it, and rebuilding ends there.
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

Product = tuple[torch.Tensor, torch.Tensor | None]  # output of a module that multiplies by its weight, and a bias


class RebuiltAll(Exception):  # not an error: it ends the rebuilding of a layer
    """Raised at the last hook point: all tensors that the backward pass needs have been rebuilt."""


class Run(Protocol):
    """The calls that a hook point makes in place of its module's forward."""

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
    """The forward pass of a layer: a record takes its saved tensors."""

    def __init__(self, record: LayerRecord) -> None:
        self.record = record
        self._save: Callable[[torch.Tensor], SavedTensor] = record.save_between
        self._of_attention: list[tuple[SavedTensor, torch.Tensor]] = []

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
        """See ``Run``: [rows, ...]. Tensors that the module saves beside input and weight are of kind "input"."""
        self.record.pass_hook_point(name, inputs, "token")
        with self._saving(lambda tensor: self.record.save_inside(tensor, "input")):
            output, bias = forward(inputs, *args, **kwargs)
        self.record.notes[name] = bias
        if self.record.plan.rebuild_cheap:
            self.record.pass_hook_point(f"{name} output", output, "product")
        return output, bias

    def attention(self, forward: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        """See ``Run``: all [rows, ...]. Saved tensors no larger than the output are of kind "input"."""
        for name, tensor in zip(("query", "key", "value"), args, strict=False):
            assert isinstance(tensor, torch.Tensor)
            self.record.pass_hook_point(name, tensor, "token")
        with self._saving(self._save_of_attention):
            output = forward(*args, **kwargs)
        if memory_order(output)[0] and not is_sample_major(output):
            output = output.contiguous()
        self.record.pass_hook_point(ATTENTION_OUTPUT, output, "input")
        for saved, tensor in self._of_attention:
            kind = "input" if tensor.numel() <= output.numel() else ""
            vars(saved).update(vars(self.record.save_inside(tensor, kind)))  # autograd holds ``saved`` already
        self._of_attention.clear()
        return output

    def _save_of_attention(self, tensor: torch.Tensor) -> SavedTensor:
        """Delay saving: only after attention has run is it known which tensor is its output."""
        self._of_attention.append((SavedTensor(), tensor.detach()))
        return self._of_attention[-1][0]

    def last[Result](
        self, forward: Callable[..., Result], inputs: torch.Tensor, *args: object, **kwargs: object
    ) -> Result:
        """See ``Run``: input [rows, ...]."""
        self.record.pass_hook_point("last", inputs, "token")
        self._save = self.record.save_inside
        return forward(inputs, *args, **kwargs)


class Rebuilding:
    """The second run of a layer, on dropped rows and up to its last hook point; attention is skipped."""

    def __init__(self, record: LayerRecord) -> None:
        self.record = record

    def pack(self, tensor: torch.Tensor) -> None:
        """Give the record a tensor of any shape; autograd keeps nothing, because no backward pass follows."""
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
        """See ``Run``: [rows, ...]. Multiplies only the rows that are not known."""
        record = self.record
        record.rebuild_hook_point(name, inputs)

        def compute(first: int) -> torch.Tensor:
            repeats = record.hook_points[name].view.sizes[0] // record.split.total
            rows = inputs.unflatten(0, (repeats, -1))[:, first:].flatten(0, 1) if first else inputs
            with torch.no_grad():
                output = forward(rows, *args, **kwargs)[0]
            num_rows = max(rows[..., 0].numel(), output[..., 0].numel())
            assert isinstance(module.weight, torch.Tensor), f"{name}: {module}"
            record.counts.recomputed_flops += 2 * module.weight.numel() * num_rows
            return output

        output = record.product(f"{name} output", compute) if record.plan.rebuild_cheap else compute(0)
        return output.detach().requires_grad_(), record.notes[name]

    def attention(self, forward: Callable[..., torch.Tensor], *args: object, **kwargs: object) -> torch.Tensor:
        """See ``Run``: all [rows, ...]. The output is known: nothing is computed or sent to other ranks."""
        record = self.record
        for name, tensor in zip(("query", "key", "value"), args, strict=False):
            assert isinstance(tensor, torch.Tensor)
            record.rebuild_hook_point(name, tensor)
        return record.rows_from(ATTENTION_OUTPUT, record.first_row).detach().requires_grad_()

    def last[Result](
        self, forward: Callable[..., Result], inputs: torch.Tensor, *args: object, **kwargs: object
    ) -> Result:
        """See ``Run``: input [rows, ...]. Never returns."""
        self.record.rebuild_hook_point("last", inputs)
        raise RebuiltAll
