"""Measure how long the host needs to launch a layer, as ratios to stock Megatron in the same run.

    .venv/bin/python scripts/bench/host/overhead.py [--json]

A device that runs ahead waits for the host. Here 32 layers of tiny tensors run on the CPU, and attention kernels only
copy the queries, so that the processor time is the time of the host. Each arm runs a micro-batch forward and backward:

    stock      Megatron's layer with a flash-attn kernel
    local      one local document
    slice      a slice of a document, the mean of 4 or 16 slices
    ring       a document on a ring of ranks, whose messages are zeros
    swap       one local document under an activation policy, as are memo and priced

The arms alternate, and the best round of each counts. Operators are counted in one more round and do not depend on the
machine: ``launched`` are the operators except views and allocations, ``reads`` are the waits for a value of the device.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # so that it also runs as a file

from bytescale_ext.activation.store import ActivationStore
from bytescale_ext.attention.kernels.flash_attn import FlashAttn
from bytescale_ext.attention.kernels.table import Kernel
from bytescale_ext.attention.layouts.layout import AttentionLayout, attention_layout
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.layouts.slices import SliceLayout, sample_layouts
from bytescale_ext.attention.slices import MicroBatchPrefix
from bytescale_ext.parallel.p2p import Pending, Transfer
from bytescale_ext.plan.activation.plan import ActivationPlan
from bytescale_ext.plan.cost.model_shape import ModelShape
from bytescale_ext.plan.step.micro_batch import MicroBatch, Shard, zigzag_ranges

SHAPE: Final = ModelShape(32, 32, 2, 2, 16, 64, True, 64)
TOKENS: Final = 32
"""Tokens of a micro-batch or slice."""

POLICIES: Final = {
    "swap": ActivationPlan("swap", 1.0, 0.0, 1.0),
    "memo": ActivationPlan("memo", 0.5, 0.5, 1.0),
    "priced": ActivationPlan("priced", 0.5, 0.25, 1.0, True),
}
SLICES: Final = (4, 16)
RINGS: Final = (4, 8)


def _flash_attn_varlen_forward(q: torch.Tensor, **_: object) -> tuple[torch.Tensor, torch.Tensor, None, None]:
    """Stub of flash-attn 2: the output is ``q [tq, heads, dim]``, the log-sum-exp ``[heads, tq]`` is zero."""
    return q.clone(), q.new_zeros((q.shape[1], q.shape[0])), None, None


def _flash_attn_varlen_backward(
    dout: torch.Tensor, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, causal: bool, **_: object
) -> torch.Tensor:
    """Stub of flash-attn 2: ``dq [tq, heads, dim]`` is ``dout``, or zero for earlier keys.

    The gradients ``dk, dv [tk, kv_heads, dim]`` are zero.
    """
    if causal:
        dq.copy_(dout)
    else:
        dq.zero_()
    dk.zero_()
    dv.zero_()
    return dq


def join_stub(totals: tuple[torch.Tensor, torch.Tensor], part: tuple[torch.Tensor, torch.Tensor], rows: Rows) -> None:
    """Stub of the fused join: one operator on the log-sum-exp ``[heads, t]``. The totals already hold the queries."""
    totals[1].add_(0.0)


def kernel_stub() -> Kernel:
    """Return our kernel for the stubs of flash-attn."""
    flash = FlashAttn(__name__, __name__, "_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
    cpu, dtypes = ("cpu",), (torch.float32,)
    return Kernel("stub", cpu, dtypes, lambda: None, flash.forward, flash.backward, join=join_stub)


class FlashFunction(torch.autograd.Function):
    """Attention as a flash-attn package offers it to Megatron."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the output ``[t, heads, dim]`` of ``q [t, heads, dim]`` and ``k, v [t, kv_heads, dim]``."""
        out, lse, *_ = _flash_attn_varlen_forward(q, k=k, v=v)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the gradients of ``q, k, v``, of their shapes; ``dout``: ``[t, heads, dim]``."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_varlen_backward(dout, dq, dk, dv, causal=True, q=q, out=out, softmax_lse=lse)
        return dq, dk, dv


class StockAttention(torch.nn.Module):
    """Core attention of stock Megatron with a flash-attn kernel."""

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Map query [t, 1, heads, dim] and key, value [t, 1, kv_heads, dim] to [t, 1, heads * dim]."""
        q, k, v = (tensor.squeeze(1).contiguous() for tensor in (query, key, value))
        out: torch.Tensor = FlashFunction.apply(q, k, v)  # type: ignore[no-untyped-call]  # torch's
        return out.flatten(1).unsqueeze(1)


class SilentComm:
    """Communication whose messages are zeros and always there."""

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer]) -> Pending:
        """Fill the received tensors of any shape with zeros."""
        for tensor, _ in receives:
            tensor.zero_()
        return self

    def wait(self) -> None:
        """Return: the messages are there."""


@dataclass
class OperatorCounts(TorchDispatchMode):
    """Count of the operators that torch dispatches.

    Attributes:
        operators: all operators.
        launched: operators except views and allocations, which a device has to compute.
        reads: values that the host reads.
    """

    operators: int = 0
    launched: int = 0
    reads: int = 0

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, without annotations

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = func._schema.name
        self.operators += 1
        self.reads += "_local_scalar_dense" in name
        self.launched += not (func.is_view or "empty" in name or name in ("aten::detach", "aten::_unsafe_view"))
        return func(*args, **(kwargs or {}))


@dataclass
class Figures:
    """Figures of one arm.

    Attributes:
        name: name of the arm.
        loss: mean loss of a micro-batch or slice.
        milliseconds: host milliseconds of a layer and a micro-batch or slice, forward and backward, in the best round.
        operators, launched, reads: see ``OperatorCounts``; per layer, ``reads`` per micro-batch or slice.
    """

    name: str
    loss: float = 0.0
    milliseconds: float = float("inf")
    operators: float = 0.0
    launched: float = 0.0
    reads: float = 0.0


@dataclass
class Arm:
    """One way to run ``units`` micro-batches or slices; ``run`` returns their losses, forward and backward."""

    name: str
    run: Callable[[], list[float]]
    units: int = 1
    figures: Figures = field(init=False)

    def __post_init__(self) -> None:
        self.figures = Figures(self.name)

    def time(self) -> None:
        """Run a round and keep its time if it is the best."""
        begun = time.process_time()
        self.run()
        seconds = time.process_time() - begun
        self.figures.milliseconds = min(self.figures.milliseconds, seconds * 1e3 / self.units / SHAPE.num_layers)

    def count(self) -> None:
        """Run a round that counts operators."""
        with OperatorCounts() as counts:
            losses = self.run()
        self.figures.loss = sum(losses) / self.units
        self.figures.operators = counts.operators / self.units / SHAPE.num_layers
        self.figures.launched = counts.launched / self.units / SHAPE.num_layers
        self.figures.reads = counts.reads / self.units


@dataclass
class Models:
    """Models with equal weights, which differ in their layers.

    Attributes:
        stock: Megatron's model.
        documents: the model with attention over documents.
        planned: the model with attention over documents and activation policies.
        store: activation store of ``planned``.
    """

    stock: torch.nn.Module
    documents: torch.nn.Module
    planned: torch.nn.Module
    store: ActivationStore


def build_models() -> Models:
    """Build the models on the CPU, in a process group of one."""
    from megatron.bytescale.core.transformer.dot_product_attention import DocumentAttention
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.one_device import build_model, stock_model

    planned = build_model(SHAPE, torch.float32, 1 << 24, on_cpu=True)
    runtime = Runtime.alone(SHAPE, torch.float32, torch.device("cpu"), kernel_stub())
    runtime.add_parts(comm=SilentComm())
    for layer in planned.model.decoder.layers:  # type: ignore[union-attr]
        layer.self_attention.core_attention.runtime = runtime
    documents = stock_model(planned, partial(DocumentAttention, runtime=runtime))
    return Models(stock_model(planned, StockAttention), documents, planned.model, planned.store)


def local_layout() -> AttentionLayout:
    """Return the layout of one local document."""
    return attention_layout(MicroBatch((Shard(0, ((0, TOKENS),), (0,)),)), 0, (TOKENS,), TOKENS)


def ring_layout(width: int) -> AttentionLayout:
    """Return the layout of one document on a ring of ``width`` ranks, on rank 0."""
    length = TOKENS * width
    shard = Shard(0, tuple(zigzag_ranges(length, width, 0)), tuple(range(width)))
    return attention_layout(MicroBatch((shard,)), 0, (length,), TOKENS)


def forward(
    model: torch.nn.Module, layout: AttentionLayout | SliceLayout | None, prefix: MicroBatchPrefix | None = None
) -> torch.Tensor:
    """Return the mean loss, a scalar, of a micro-batch or slice. Stock Megatron has no layout."""
    from megatron.bytescale.core.packed_seq_params import DocumentSeqParams

    tokens = torch.arange(TOKENS)
    params = None if layout is None else DocumentSeqParams(positions=tokens, layout=layout, prefix=prefix)
    losses = model(tokens[None], tokens[None], None, labels=tokens[None].flip(1), packed_seq_params=params)
    return losses.float().mean()


def run_one(model: torch.nn.Module, layout: AttentionLayout | None) -> list[float]:
    """Run a micro-batch forward and backward and return its loss."""
    loss = forward(model, layout)
    loss.backward()
    return [loss.detach().item()]


def run_slices(model: torch.nn.Module, layouts: Sequence[SliceLayout]) -> list[float]:
    """Run all slices of a micro-batch forward, then backward from the last to the first; return their losses."""
    prefix = MicroBatchPrefix()
    losses = [forward(model, layout, prefix) for layout in layouts]
    for loss in reversed(losses):
        loss.backward()
    return [loss.detach().item() for loss in losses]


def run_policy(models: Models, plan: ActivationPlan, layout: AttentionLayout) -> list[float]:
    """Run a micro-batch under an activation policy and return its loss."""
    models.store.plan = plan
    losses = run_one(models.planned, layout)
    models.store.check_empty()
    return losses


def arms_of(models: Models) -> list[Arm]:
    """Return all arms, stock Megatron first."""
    arms = [
        Arm("stock", partial(run_one, models.stock, None)),
        Arm("local", partial(run_one, models.documents, local_layout())),
    ]
    for count in SLICES:
        layouts = sample_layouts([TOKENS] * count, 1)
        arms.append(Arm(f"slice of {count}", partial(run_slices, models.documents, layouts), count))
    arms += [Arm(f"ring of {width}", partial(run_one, models.documents, ring_layout(width))) for width in RINGS]
    policies = POLICIES.items()
    arms += [Arm(name, partial(run_policy, models, plan, local_layout())) for name, plan in policies]
    return [*arms, Arm("priced, ring of 4", partial(run_policy, models, POLICIES["priced"], ring_layout(4)))]


def measure(arms: Sequence[Arm], rounds: int) -> list[Figures]:
    """Count the operators of each arm, then time all arms in turn, ``rounds`` times."""
    for arm in arms:
        arm.run()
        arm.count()
    for _ in range(rounds):
        for arm in arms:
            arm.time()
    return [arm.figures for arm in arms]


def table(figures: Sequence[Figures]) -> list[str]:
    """Return the lines of the printed table; the first arm is stock Megatron."""
    stock = figures[0]
    lines = [f"{'':18} {'ms':>6} {'ratio':>6} {'operators':>9} {'ratio':>6} {'launched':>8} {'reads':>5}  loss"]
    for arm in figures:
        lines.append(
            f"{arm.name:18} {arm.milliseconds:6.2f} {arm.milliseconds / stock.milliseconds:6.2f} "
            f"{arm.operators:9.1f} {arm.operators / stock.operators:6.2f} {arm.launched:8.1f} {arm.reads:5.0f}  "
            f"{arm.loss:.6f}"
        )
    by_name = {arm.name: arm.milliseconds for arm in figures}
    for width in RINGS:
        block = (by_name[f"ring of {width}"] - by_name["local"]) / (width - 1)
        lines.append(f"a further block of a ring of {width}: {block:.3f} ms, {block / stock.milliseconds:.2f} of stock")
    return lines


def main(words: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=20, help="number of rounds; the best round of each arm counts (20)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    figures = measure(arms_of(build_models()), args.rounds)
    print("\n".join(table(figures)))
    if args.json:
        print(json.dumps({"num_layers": SHAPE.num_layers, "arms": [asdict(arm) for arm in figures]}))


if __name__ == "__main__":
    main(sys.argv[1:])
