"""Small transformer layer with the hook points that ``PlannedTransformerLayer`` adds to Megatron's layer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bytescale_ext.activation.record import LayerRecord
from bytescale_ext.activation.run import LAYER_INPUT, LayerRun, Rebuilding, RebuiltAll, Recording
from bytescale_ext.activation.store import ActivationStore


class CausalAttention(torch.autograd.Function):
    """q, k, v [t, b, heads, dim] -> [t, b, heads * dim]; saves inputs, output and log-sum-exp [b, heads, t]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("sbhd,tbhd->bhst", q, k).masked_fill(_future(len(q)), float("-inf"))
        lse = scores.logsumexp(-1)
        out = torch.einsum("bhst,tbhd->sbhd", (scores - lse[..., None]).exp(), v).contiguous()
        ctx.save_for_backward(q, k, v, out, lse)
        return out.reshape(*out.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dout = dout.view(out.shape)
        scores = torch.einsum("sbhd,tbhd->bhst", q, k).masked_fill(_future(len(q)), float("-inf"))
        weights = (scores - lse[..., None]).exp()
        dweights = torch.einsum("sbhd,tbhd->bhst", dout, v)
        dscores = weights * (dweights - torch.einsum("sbhd,sbhd->bhs", dout, out)[..., None])
        dq, dk = torch.einsum("bhst,tbhd->sbhd", dscores, k), torch.einsum("bhst,sbhd->tbhd", dscores, q)
        return dq, dk, torch.einsum("bhst,sbhd->tbhd", weights, dout)


def _future(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).triu(1)


class ToyLayer(torch.nn.Module):
    """x [t, b, 16] -> [t, b, 16]; four heads, two of them for keys and values."""

    def __init__(self, number: int, store: ActivationStore | None) -> None:
        super().__init__()
        self.number, self.store = number, store
        if store is not None:
            store.add_layer(number)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(16), torch.nn.LayerNorm(16)])
        self.qkv, self.proj = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)
        self.fc1, self.fc2 = torch.nn.Linear(16, 48), torch.nn.Linear(24, 16)
        self.run: LayerRun | None = None
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.store is None:
            return self._compute(x)
        if not self.store.is_planned(self.number):
            read_next = self.store.before_resident(self.number)
            out = self._compute(x)
            if read_next is not None:
                out.register_hook(lambda gradient: read_next())
            return out
        parameters = frozenset(p.untyped_storage().data_ptr() for p in self.parameters())
        record = self.store.new_record(self.number, x.shape[0], parameters)
        record.pass_hook_point(LAYER_INPUT, x, "input")
        run = Recording(record)
        with self._running(run), run.saving():
            out = self._compute(x)
        record.rebuild = self._rebuild
        record.close()
        return out

    def _rebuild(self, record: LayerRecord) -> None:
        if self.fails:
            raise RuntimeError("no")
        x = record.rows_from(LAYER_INPUT, record.first_row).detach().requires_grad_()
        run = Rebuilding(record)
        hooks = torch.autograd.graph.saved_tensors_hooks(run.pack, lambda nothing: nothing)
        with self._running(run), torch.enable_grad(), hooks, contextlib.suppress(RebuiltAll):
            self._compute(x)

    @contextlib.contextmanager
    def _running(self, run: LayerRun) -> Iterator[None]:
        self.run = run
        try:
            yield
        finally:
            self.run = None

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        qkv, _ = self._product("qkv", self.qkv, self.norms[0](x))
        q, k, v = qkv.unflatten(-1, (2, 16)).split([8, 4, 4], -1)
        q = q.reshape(*q.shape[:2], 4, 4)
        q, k = q * 1.5, torch.sin(k)
        k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        attention: Callable[..., Any] = CausalAttention.apply
        out = attention(q, k, v) if self.run is None else self.run.attention(attention, q, k, v)
        x = x + self._product("proj", self.proj, out)[0]
        gate, up = self._product("fc1", self.fc1, self.norms[1](x))[0].chunk(2, -1)
        inner = functional.silu(gate) * up
        return x + (self.fc2(inner) if self.run is None else self.run.last(self.fc2, inner))

    def _product(self, name: str, module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        forward = partial(_with_no_bias, module)
        return forward(x) if self.run is None else self.run.product(name, module, forward, x)


def _with_no_bias(module: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, None]:
    return module(x), None
