"""The two ways in which a layer runs under an activation policy: forward with a record, and again to rebuild it.

A layer's *stations* are the modules that multiply matrices, and attention. They call the run that is going on; in
between only cheap, token-wise operations happen. The last station is the MLP's second product, or a layer of experts:
what comes after it is left to autograd, and rebuilding ends there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from bytescale_ext.activation.record import LayerRecord, Slip
from bytescale_ext.activation.region import memory_order

LAYER_INPUT = "layer input"
ATTENTION_OUTPUT = "attention output"


class RebuiltAll(Exception):  # noqa: N818  # no error: it ends the rebuilding of a layer
    """Everything that the backward pass needs has been rebuilt."""


class Run(Protocol):
    """What a station calls in place of its module's own forward."""

    def product(
        self, name: str, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """A module that multiplies by its weight: (input [rows, ...]) -> (output [rows, ...], bias or None)."""
        ...

    def attention(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Core attention: (query, key, value, ...) -> output, all [rows, ...]."""
        ...

    def last(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The last station: (input [rows, ...]) -> anything."""
        ...


class Recording:
    """The forward pass of a layer: its saved tensors become slips of a record."""

    def __init__(self, record: LayerRecord) -> None:
        self.record = record
        self._save: Callable[[torch.Tensor], Slip] = record.save_between
        self._of_attention: list[tuple[Slip, torch.Tensor]] = []

    def pack(self, tensor: torch.Tensor) -> Slip:
        """What autograd keeps in place of ``tensor``."""
        return self._save(tensor)

    @contextlib.contextmanager
    def _saving(self, save: Callable[[torch.Tensor], Slip]) -> Iterator[None]:
        before, self._save = self._save, save
        try:
            yield
        finally:
            self._save = before

    def product(
        self, name: str, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """See ``Run``. What the module saves beside its input and weight is treated as the layer's input is."""
        self.record.pass_station(name, args[0], "token")
        with self._saving(lambda tensor: self.record.save_inside(tensor, "input")):
            output, bias = forward(*args, **kwargs)
        self.record.notes[name] = bias
        if self.record.plan.rebuild_cheap:
            self.record.pass_station(f"{name} output", output, "product")
        return output, bias

    def attention(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """See ``Run``. What attention saves of the size of its output, as the log-sum-exp, is treated as that is."""
        for name, tensor in zip(("query", "key", "value"), args, strict=False):
            self.record.pass_station(name, tensor, "token")
        with self._saving(self._save_of_attention):
            output: torch.Tensor = forward(*args, **kwargs)
        if memory_order(output)[0]:  # slices of several samples lie sample after sample
            output = output.contiguous()
        self.record.pass_station(ATTENTION_OUTPUT, output, "input")
        for slip, tensor in self._of_attention:
            kind = "input" if tensor.numel() <= output.numel() else ""
            filled = self.record.save_inside(tensor, kind)
            slip.record, slip.tensor, slip.item, slip.shape = filled.record, filled.tensor, filled.item, filled.shape
        self._of_attention.clear()
        return output

    def _save_of_attention(self, tensor: torch.Tensor) -> Slip:
        """Which of attention's tensors is its output is known when it has run."""
        self._of_attention.append((Slip(), tensor.detach()))
        return self._of_attention[-1][0]

    def last(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See ``Run``."""
        self.record.pass_station("last", args[0], "token")
        self._save = self.record.save_inside
        return forward(*args, **kwargs)


class Rebuilding:
    """A layer runs again, on the rows that were dropped, to its last station; attention is passed over."""

    def __init__(self, record: LayerRecord) -> None:
        self.record = record

    def pack(self, tensor: torch.Tensor) -> None:
        """Take what autograd would save; nothing is kept, for this run has no backward pass."""
        self.record.rebuild_between(tensor)

    def product(
        self, name: str, module: torch.nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """See ``Run``. Only rows that are not known are multiplied."""
        record, inputs = self.record, args[0]
        record.rebuild_station(name, inputs)

        def compute(first: int) -> torch.Tensor:
            repeats = record.stations[name].shape.sizes[0] // record.split.total
            rows = inputs.unflatten(0, (repeats, -1))[:, first:].flatten(0, 1) if first else inputs
            with torch.no_grad():
                output: torch.Tensor = forward(rows, *args[1:], **kwargs)[0]
            num_rows = max(rows[..., 0].numel(), output[..., 0].numel())
            record.counts.recomputed_flops += 2 * module.weight.numel() * num_rows  # type: ignore[operator,union-attr]
            return output

        output = record.product(f"{name} output", compute) if record.plan.rebuild_cheap else compute(0)
        return output.detach().requires_grad_(), record.notes[name]

    def attention(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """See ``Run``. Its output is known: nothing is computed, nothing is sent to other ranks."""
        record = self.record
        for name, tensor in zip(("query", "key", "value"), args, strict=False):
            record.rebuild_station(name, tensor)
        return record.rows_from(record.stations[ATTENTION_OUTPUT], record.first_row).detach().requires_grad_()

    def last(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """See ``Run``. Never returns."""
        self.record.rebuild_station("last", args[0])
        raise RebuiltAll
