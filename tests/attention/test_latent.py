"""Latents instead of keys and values, in rings and slices, against dense attention over their expansion in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.latent import Expansion, latent_halves
from bytescale_ext.attention.ring import ring_attention
from bytescale_ext.attention.virtual import mailbox_comms, run_in_turn
from bytescale_ext.parallel.p2p import Comm
from bytescale_ext.plan.cost.cost_model import CostModel
from bytescale_ext.plan.cost.slice_shares import SliceShares
from bytescale_ext.plan.schedule.document_slices import SliceRule
from bytescale_ext.plan.step.sizes import Slicing
from tests.attention.cases import GROUPS, MIXED, TINY, Case, assert_matches, dense_attention, run_virtual
from tests.attention.layouts.test_slices import COST, LONG, run_slices
from tests.attention.test_slices import run_in_slices


@dataclass(frozen=True)
class LatentCase(Case):
    """Case with keys and values that are halves of latents; ``dim`` is the larger head size of keys and values.

    Attributes:
        key_rank: width of a latent.
        sizes: width of a key's head without positions, and of a value's head.
        position_dim: width of the part of a key with positions.
    """

    key_rank: int = 7
    sizes: tuple[int, int] = (5, 6)
    position_dim: int = 3

    def weight(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(11)
        return torch.randn(self.heads * sum(self.sizes), self.key_rank, generator=generator, dtype=torch.float64)

    def backend(self, comm: Comm | None, name: str = "reference", dtype: torch.dtype = torch.float64) -> Backend:
        expansion = Expansion(self.weight().to(dtype), self.sizes, self.position_dim)
        plain = super().backend(comm, name, dtype)
        widths = self.sizes[0] + self.position_dim, self.sizes[1]
        kernel = plain.kernel if plain.kernel.takes(widths) else plain.kernel.with_padding(widths)
        return dataclasses.replace(plain, expansion=expansion, kernel=kernel)

    def latents(self, seq: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(2000 + seq)
        numbers = self.key_rank + self.position_dim
        return torch.randn(self.lengths[seq], numbers, generator=generator, dtype=torch.float64)

    def values(self, seq: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        q, _, _, dout = super().values(seq, dtype)
        content_dim, value_dim = self.sizes
        halves = latent_halves(self.latents(seq).to(dtype))
        return q[..., : content_dim + self.position_dim], *halves, dout[..., :value_dim]

    def expected(self, dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, ...]]:
        return [answer[:-1] for answer in expanded_answers(self)]

    def expected_weight(self) -> torch.Tensor:
        """Return the gradient of the weight, summed over all sequences."""
        return torch.stack([answer[-1] for answer in expanded_answers(self)]).sum(0)


@lru_cache(maxsize=8)
def expanded_answers(case: LatentCase) -> list[tuple[torch.Tensor, ...]]:
    """Return ``out, dq, dk, dv`` of each sequence and its gradient of the weight, by einsums and autograd."""
    answers = []
    for seq, length in enumerate(case.lengths):
        q, _, _, dout = case.values(seq, torch.float64)
        leaves = q, latents, weight = [one.requires_grad_() for one in (q, case.latents(seq), case.weight())]
        of_heads = weight.unflatten(0, (case.heads, -1))
        expanded = torch.einsum("tr,hnr->thn", latents[:, : case.key_rank], of_heads)
        shared = latents[:, None, case.key_rank :].expand(-1, case.heads, -1)
        k = torch.cat((expanded[..., : case.sizes[0]], shared), -1)
        v = expanded[..., case.sizes[0] :]
        out = dense_attention(q, k, v, (length,), case.scale, case.window, case.sink())
        dq, of_latents, of_weight = torch.autograd.grad(out, leaves, dout)
        answers.append((out.detach(), dq, *latent_halves(of_latents), of_weight))
    return answers


def latent(case: Case, **named: object) -> LatentCase:
    """Return a case with the same sequences and ranks."""
    fields = {field.name: getattr(case, field.name) for field in dataclasses.fields(case)}
    return LatentCase(**{**fields, **named})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "dtype", "tolerance"), [("reference", torch.float64, 1e-10), ("cpu_flash", torch.float32, 2e-5)]
)
@pytest.mark.parametrize("case", [MIXED, TINY, GROUPS], ids=["mixed", "tiny", "groups"])
def test_rings_of_latents(case: Case, name: str, dtype: torch.dtype, tolerance: float) -> None:
    """With rings of 1 to 4 ranks, packs and padding, the gradients of all ranks sum to the weight's gradient."""
    given = latent(case)
    results, _ = run_virtual(given, name, dtype)
    assert_matches(given, results, tolerance, dtype)
    total = torch.stack([tensors[4].double() for tensors in results.values()]).sum(0)
    expected = given.expected_weight()
    assert (total - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize(
    "named",
    [
        {"dim": 9, "sizes": (2, 9)},  # values are wider
        {"dim": 8, "sizes": (6, 4), "position_dim": 2, "key_rank": 6},  # keys are wider, and halves are even
        {"window": 5},
        {"sinks": True},
        {"inner_width": 2},
    ],
    ids=["wide", "even", "window", "sinks", "hierarchical"],
)
def test_other_shapes_and_rings(named: dict[str, object]) -> None:
    given = latent(GROUPS, **named)
    results, _ = run_virtual(given, "reference", torch.float64)
    assert_matches(given, results, 1e-10)
    total = torch.stack([tensors[-1] for tensors in results.values()]).sum(0)
    torch.testing.assert_close(total, given.expected_weight(), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(("kept", "swapped"), [(0, 0), (1000, 0), (0, 1000)], ids=["travel", "kept", "swapped"])
@pytest.mark.parametrize(("case", "num_slices"), [(LONG, 3), (GROUPS, 1)], ids=["long", "groups"])
def test_slices_of_latents(case: Case, num_slices: int, kept: int, swapped: int) -> None:
    given = latent(case)
    total = torch.zeros_like(given.weight())
    rule = SliceRule(Slicing(num_slices, kept, summed_tokens=kept, swapped_tokens=swapped), COST)
    for number in range(len(case.rounds)):
        comms = mailbox_comms(case.num_ranks)
        for gradient in run_in_turn([run_slices(given, number, comm, rule) for comm in comms]):
            assert gradient is not None
            total += gradient
    torch.testing.assert_close(total, given.expected_weight(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_costs_count_the_expansions_of_the_slowest_member(num_slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cost of both passes counts the rows that each member of a ring of 3 expands, and their gradients."""
    rows: dict[int, list[int]] = {}

    def count(name: str, place: int) -> None:
        original = getattr(Expansion, name)

        def counted(self: Expansion, first: Any, *others: Any) -> Any:
            of_member = rows.setdefault(self.weight.data_ptr(), [0, 0])
            of_member[place] += (first if place == 0 else first[0]).shape[0]
            return original(self, first, *others)

        monkeypatch.setattr(Expansion, name, counted)

    count("expand", 0)
    count("collapse", 1)
    given = LatentCase((360,), (((0, (0, 1, 2)),),), 3)
    rule, comms = SliceRule(Slicing(num_slices, 1000), COST), mailbox_comms(3)
    run_in_turn([run_slices(given, 0, comm, rule) for comm in comms])
    (ends,) = rule(given.micro_batch(0, 0), given.lengths).ring_ends
    cost = CostModel(a=0.0, b=1.0, e=1.0)
    shares = SliceShares.of(cost, np.array([360.0]), np.array([3.0]), Slicing(num_slices))
    tokens = np.diff(np.array([0, *ends])) / 360
    counted_rows = dataclasses.replace(shares, tokens=tokens[None]).costs(cost)[0].sum()
    assert max(expanded for expanded, _ in rows.values()) == 2 * counted_rows  # once in each pass
    assert max(collapsed for _, collapsed in rows.values()) == counted_rows
    assert len(rows) == 3


def test_only_latents_travel() -> None:
    """A ring of 4 sends 10 numbers per token with each hop: forward, backward, and as a sum of gradients."""
    given = LatentCase((160,), (((0, (0, 1, 2, 3)),),), 4)
    _, comms = run_virtual(given, "reference", torch.float64)
    assert sum(comm.stats.bytes_sent for comm in comms) == 3 * 160 * 3 * (7 + 3) * 8


@pytest.mark.parametrize("num_slices", [0, 1, 3])
def test_autograd_reaches_the_weight(num_slices: int) -> None:
    """The micro-batch is whole (0) or in slices. It runs twice, because each backward pass begins with a new sum."""
    given = LatentCase((12,), (((0, (0,)),),), 1, num_padding=0)
    backend = given.backend(None)
    assert backend.expansion is not None
    weight = backend.expansion.weight.requires_grad_()
    q, k, v, dout = given.inputs(0, 0, torch.float64)
    leaves = [one.requires_grad_() for one in (q, k, v)]
    for times in (1, 2):
        if num_slices:
            run_in_slices(leaves, dout, num_slices, backend)
        else:
            ring_attention(q, k, v, given.layout(0, 0), backend).backward(dout)
        torch.testing.assert_close(weight.grad, times * given.expected_weight(), rtol=1e-10, atol=1e-10)
    for leaf, wanted in zip(leaves, given.expected()[0][1:], strict=True):
        torch.testing.assert_close(leaf.grad, 2 * wanted, rtol=1e-10, atol=1e-10)


def test_gradients_of_the_weight_are_summed_in_float32() -> None:
    given = LatentCase((12,), (((0, (0,)),),), 1)
    backend = given.backend(None, "cpu_flash", torch.bfloat16)
    started = backend.for_backward()
    assert backend.expansion is not None
    assert backend.expansion.gradient is None
    assert started.expansion is not None
    assert started.expansion.gradient is not None
    assert started.expansion.gradient.dtype == torch.float32
    assert started.expansion.gradient.shape == backend.expansion.weight.shape
    gradient = started.expansion_gradient()
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16
    assert backend.expansion_gradient() is None


def shapes_that_do_not_fit() -> Sequence[tuple[list[tuple[int, ...]], torch.dtype]]:
    fitting = [(15, 4, 8), (15, 1, 5), (15, 1, 5)]
    return [
        ([(15, 4, 7), *fitting[1:]], torch.float64),
        ([fitting[0], (15, 1, 6), (15, 1, 6)], torch.float64),
        ([(14, 4, 8), *fitting[1:]], torch.float64),
        (fitting, torch.float32),
    ]


@pytest.mark.parametrize(("shapes", "dtype"), shapes_that_do_not_fit())
def test_tensors_that_do_not_fit_are_refused(shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    given = LatentCase((12,), (((0, (0,)),),), 1)
    q, k, v = (torch.zeros(shape, dtype=torch.float64) for shape in shapes)
    with pytest.raises(ValueError, match="attention over latents needs"):
        ring_attention(q.to(dtype), k, v, given.layout(0, 0), given.backend(None))
