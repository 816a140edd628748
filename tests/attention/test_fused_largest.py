"""The fused kernel of largest scores, in Triton's interpreter, against scores written out."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bytescale_ext.attention import largest
from bytescale_ext.attention.largest import LargestFunction, choose_largest, probe_largest, raise_largest_
from tests.attention.cases import block_of, block_tensors
from tests.attention.test_largest import BLOCKS, of_block
from tests.attention.triton_kernels import compiled, kernel_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the package triton")


@pytest.fixture(scope="module")
def fused() -> Iterator[LargestFunction]:
    """Return the kernel in Triton's interpreter on a CPU, with small tiles."""
    from bytescale_ext.attention import fused_largest

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setattr(fused_largest, "QUERIES", 16)
        patch.setattr(fused_largest, "KEYS", 16)
        fused_largest.program.cache_clear()
        yield fused_largest.fused_raise_largest_
        fused_largest.program.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block(fused: LargestFunction, name: str, dtype: torch.dtype) -> None:
    """The interpreter multiplies the bits of bfloat16 as whole numbers, so only a GPU's probe sees this type."""
    block = BLOCKS[name]
    q, k, _, _ = block_tensors(block, dtype, dim=24)
    found = torch.full((4,), -torch.inf)
    fused(found, q, k, block)
    torch.testing.assert_close(found.double(), of_block(q, k, block), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.one_of(st.none(), st.integers(1, 50)), st.data())
@settings(max_examples=20, deadline=None)
def test_any_block(fused: LargestFunction, lengths: list[int], window: int | None, data: st.DataObject) -> None:
    keys = [length + data.draw(st.integers(0, 30)) for length in lengths] if window else lengths
    block = block_of(lengths, keys, window=window)
    kv_heads = data.draw(st.sampled_from([1, 3, 6]))
    q, k, _, _ = block_tensors(block, torch.float32, heads=6, kv_heads=kv_heads, dim=data.draw(st.integers(1, 40)))
    expected, found = (torch.full((6,), -2.0) for _ in range(2))
    raise_largest_(expected, q, k, block)
    fused(found, q, k, block)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_strided_queries_and_keys(fused: LargestFunction) -> None:
    block = block_of([30, 11])
    q, k, _, _ = block_tensors(block, torch.float32)
    wide = torch.zeros(41, 2, 32)
    wide[:, :, ::2] = k
    expected, found = (torch.full((4,), -torch.inf) for _ in range(2))
    raise_largest_(expected, q, k, block)
    fused(found, torch.cat((q, q), 1)[:, :4], wide[:, :, ::2], block)
    torch.testing.assert_close(found, expected)


def test_the_choice_depends_on_device_and_probe(fused: LargestFunction, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_largest(CPU, torch.bfloat16, 128) == (raise_largest_, "it runs on cuda, not on cpu")
    assert choose_largest(CUDA, torch.float64, 128)[0] is raise_largest_
    monkeypatch.setattr(largest, "PROBES", (largest.PROBES[0],))
    assert probe_largest(fused, CPU, torch.float32, 8) is None

    def wrong(found: torch.Tensor, *_: object) -> None:
        found.fill_(3.0)

    def fails(*_: object) -> None:
        raise RuntimeError("no")

    assert probe_largest(wrong, CPU, torch.float32, 8) == "its probe differs from torch"
    assert probe_largest(fails, CPU, torch.float32, 8) == "its probe failed: RuntimeError: no"


SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Largest shared memory of a program by compute capability (CUDA C programming guide, table of technical features)."""


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("capability", "dtype", "dim"),
    [(80, "bf16", 128), (90, "bf16", 192), (90, "fp32", 128), (100, "bf16", 256), (120, "fp16", 64)],
)
def test_it_compiles_for_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, dtype: str, dim: int
) -> None:
    """The kernel compiles to machine code without a device, and its tiles fit into shared memory."""
    import triton

    from bytescale_ext.attention import fused_largest

    kernel = kernel_of(fused_largest, monkeypatch, tmp_path)
    constants = {"DIM": dim, "WIDTH": triton.next_power_of_2(dim), "QUERIES": 128, "KEYS": 64}
    types = {"q": f"*{dtype}", "k": f"*{dtype}", "first": "*i32", "stop": "*i32", "found": "*fp32"}
    code = compiled(kernel, types, constants, capability, num_warps=8, num_stages=2)
    assert code.asm["cubin"]
    assert code.metadata.shared <= SHARED_BYTES[capability]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif("GHOST_DEVICES" in os.environ, reason="a ghost GPU cannot run kernels of Triton")
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_on_a_gpu(head_dim: int) -> None:
    assert choose_largest(CUDA, torch.bfloat16, head_dim)[1] is None
