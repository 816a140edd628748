"""The fused kernel that joins blocks, in Triton's interpreter, against torch's operators."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention import merge
from bytescale_ext.attention.backend import Backend
from bytescale_ext.attention.kernels.contract import Output, accumulation_dtype
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.merge import JoinFunction, choose_join, join_, probe_join
from bytescale_ext.attention.virtual import mailbox_comms
from tests.attention.cases import GROUPS, MIXED, Case, assert_matches, kernel_named, run_round
from tests.attention.joins import assert_joins, outputs
from tests.attention.triton_kernels import compiled, kernel_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def fused() -> Iterator[JoinFunction]:
    """Return the kernel in Triton's interpreter on a CPU."""
    from bytescale_ext.attention import fused_merge

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        fused_merge.program.cache_clear()
        yield fused_merge.fused_join_
        fused_merge.program.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [8, 24, 128])
@pytest.mark.parametrize("rows", [Rows.of([(0, 7)]), Rows.of([(3, 50)]), Rows.of([(0, 2), (9, 10), (31, 50)])])
def test_joins_as_torch_does(fused: JoinFunction, dtype: torch.dtype, dim: int, rows: Rows) -> None:
    """Rings join in the accumulation dtype, documents in slices in the dtype of the output."""
    part = outputs(rows.num_rows, dtype, dim, 1)
    for of_totals in {dtype, accumulation_dtype(dtype)}:
        out, lse = outputs(50, dtype, dim, 2)
        assert_joins(fused, (out.to(of_totals), lse), part, rows)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=4), st.integers(1, 40), st.integers(0, 99))
@settings(max_examples=25)
def test_any_rows(lengths: list[tuple[int, int]], dim: int, seed: int) -> None:
    from bytescale_ext.attention import fused_merge

    intervals, row = [], 0
    for gap, length in lengths:
        intervals.append((row + gap, row + gap + length))
        row += gap + length
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        fused_merge.program.cache_clear()
        rows = Rows.of(intervals)
        totals = outputs(row + 2, torch.float32, dim, seed)
        assert_joins(fused_merge.fused_join_, totals, outputs(rows.num_rows, torch.float32, dim, seed + 1), rows)
        fused_merge.program.cache_clear()


def test_strided_tensors(fused: JoinFunction) -> None:
    """Kernels return views with heads first, sums with rows first, and strided columns."""
    out, lse = outputs(20, torch.float32, 16, 3)
    first, second = out.transpose(0, 1).contiguous().transpose(0, 1), lse.t().contiguous().t()
    rows = Rows.of([(1, 5), (8, 20)])
    assert_joins(fused, (first, second), tuple(x.clone() for x in outputs(16, torch.float32, 16, 4)), rows)  # type: ignore[arg-type]
    apart = outputs(16, torch.bfloat16, 32, 5)
    assert_joins(fused, (first, second), (apart[0][..., ::2], apart[1].t().contiguous().t()), rows)


@pytest.mark.slow
@pytest.mark.parametrize("case", [MIXED, GROUPS], ids=["mixed", "groups"])
def test_rings_are_exact(fused: JoinFunction, case: Case) -> None:
    """Outputs and gradients of rings with the fused kernel equal dense attention."""
    kernel = dataclasses.replace(kernel_named("reference"), join=fused)
    comms, ranks = mailbox_comms(case.num_ranks), range(case.num_ranks)
    inputs = [case.inputs(0, rank, torch.float64) for rank in ranks]
    layouts = [case.layout(0, rank) for rank in ranks]
    found = run_round(layouts, inputs, [Backend(comm, kernel, case.scale) for comm in comms])
    assert_matches(case, {(0, rank): found[rank] for rank in ranks}, 1e-10)


def keep_rows(totals: Output, part: Output, rows: Rows) -> None:
    """Change nothing."""


def overwrite(totals: Output, part: Output, rows: Rows) -> None:
    rows.put_(totals[0], part[0])
    rows.put_(totals[1], part[1], dim=1)


def ignore_rows(totals: Output, part: Output, rows: Rows) -> None:
    join_(totals, part, Rows.of([(0, rows.num_rows)]))


def forget_sums(totals: Output, part: Output, rows: Rows) -> None:
    join_((totals[0], totals[1].clone()), part, rows)


def make_nan(totals: Output, part: Output, rows: Rows) -> None:
    join_(totals, part, rows)
    totals[0][rows.intervals[0][0]] = torch.nan


def fail(totals: Output, part: Output, rows: Rows) -> None:
    raise subprocess.CalledProcessError(1, "gcc")


@pytest.mark.parametrize("join", [keep_rows, overwrite, ignore_rows, forget_sums, make_nan])
def test_probe_finds_wrong_kernels(join: Callable[[Output, Output, Rows], None]) -> None:
    assert probe_join(join, CPU, torch.bfloat16, 16) == "its probe differs from torch"


def test_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fused kernel is chosen if it runs and agrees, otherwise torch with the reason."""
    from bytescale_ext.attention.fused_merge import fused_join_

    assert choose_join(CPU, torch.bfloat16, 64) == (join_, "it runs on cuda, not on cpu")
    assert "its probe failed: CalledProcessError: Command 'gcc'" in str(probe_join(fail, CPU, torch.bfloat16, 16))
    monkeypatch.setattr(merge, "probe_join", lambda *_: None)
    assert choose_join(CUDA, torch.bfloat16, 64) == (fused_join_, None)
    monkeypatch.setattr(merge, "probe_join", lambda *_: "broken")
    assert choose_join(CUDA, torch.bfloat16, 64) == (join_, "broken")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert choose_join(CUDA, torch.bfloat16, 64) == (join_, "the package triton is not installed")


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "of_totals", "of_part"),
    [(80, "fp32", "bf16"), (90, "bf16", "bf16"), (90, "fp64", "fp64")],
)
def test_it_compiles_for_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, of_totals: str, of_part: str
) -> None:
    """The kernel compiles to machine code without a device, because the interpreter is less strict about types."""
    from bytescale_ext.attention import fused_merge

    kernel = kernel_of(fused_merge, monkeypatch, tmp_path)
    of_sums = "*fp64" if of_part == "fp64" else "*fp32"
    for is_view in (True, False):
        constants = {"IS_VIEW": is_view, "DIM": 96, "WIDTH": 128, "PAIRS": 16}
        types = {"out": f"*{of_totals}", "part_out": f"*{of_part}", "lse": of_sums, "part_lse": of_sums}
        types["index"] = of_sums if is_view else "*i64"
        assert compiled(kernel, types, constants, capability).asm["cubin"]
