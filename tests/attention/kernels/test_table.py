"""The choice between kernels: limits, names, counted calls and the probe."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bytescale_ext.attention.kernels import probe_child, table
from bytescale_ext.attention.kernels.contract import Gradients, Output, Saved
from bytescale_ext.attention.kernels.table import (
    KernelCalls,
    choose_kernel,
    counting,
    expected_kernels,
    kernel_table,
    probe,
)
from bytescale_ext.attention.layouts.blocks import AttentionBlock
from bytescale_ext.attention.layouts.rows import Rows
from bytescale_ext.attention.merge import JoinChoice, join_
from tests.attention.cases import block_of, block_tensors, kernel_named

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_calls_are_counted_and_change_nothing() -> None:
    block = block_of([5, 11])
    q, k, v, dout = block_tensors(block, torch.float32)
    plain = kernel_named("cpu_flash")
    counted, calls = counting(plain)
    _, others = counting(plain)
    for _ in range(2):
        out, lse = counted.forward(q, k, v, block)
    saved = Saved(q, k, v, out, lse)
    grads = counted.backward(dout, saved, block)
    assert (calls, others) == (KernelCalls(num_forward=2, num_backward=1), KernelCalls())
    assert torch.equal(out, plain.forward(q, k, v, block)[0])
    assert all(torch.equal(a, b) for a, b in zip(grads, plain.backward(dout, saved, block), strict=True))
    assert dataclasses.replace(counted, forward=plain.forward, backward=plain.backward) == plain


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float64, "reference"),
        (torch.float32, "cpu_flash"),
        (torch.bfloat16, "cpu_flash"),
        (torch.float16, "cpu_flash"),
    ],
)
def test_choice_on_cpu(dtype: torch.dtype, name: str) -> None:
    choice = choose_kernel("cpu", dtype, head_dim=24)
    assert choice.kernel.name == name
    assert str(dtype) in choice.reason
    passed_over = [row.name for row in kernel_table()]
    assert [row for row, _ in choice.considered] == passed_over[: passed_over.index(name)]
    assert all("not" in why for _, why in choice.considered)


def test_a_kernel_can_be_named() -> None:
    assert choose_kernel("cpu", torch.float32, 8, name="reference").kernel.name == "reference"
    with pytest.raises(ValueError, match="choose one of flash_attn_3, flash_attn, flash_attn_4, torch_flash"):
        choose_kernel("cpu", torch.float32, 8, name="flash")
    with pytest.raises(ValueError, match="runs on cuda, not on cpu"):
        choose_kernel("cpu", torch.bfloat16, 8, name="torch_flash")
    with pytest.raises(ValueError, match=r"not torch.float64"):
        choose_kernel("cpu", torch.float64, 8, name="cpu_flash")


def test_limits_of_a_kernel() -> None:
    row = dataclasses.replace(kernel_named("torch_flash"), missing=lambda: "not built")
    assert "multiple of 8 up to 256, got 12" in str(row.why_not(CUDA, torch.bfloat16, 12))
    assert "got 264" in str(row.why_not(CUDA, torch.bfloat16, 264))
    assert "not torch.float32" in str(row.why_not(CUDA, torch.float32, 64))
    assert row.why_not(CUDA, torch.float16, 64) == "not built"
    assert kernel_named("torch_flash").why_not(CUDA, torch.float16, 64) is None


def test_without_any_kernel_the_error_lists_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(row for row in kernel_table() if row.name != "reference")
    monkeypatch.setattr("bytescale_ext.attention.kernels.table.kernel_table", lambda: rows)
    with pytest.raises(
        ValueError, match=r"no attention kernel supports torch.float64 with head dim 16 on cpu"
    ) as error:
        choose_kernel("cpu", torch.float64, 16)
    assert all(f"{row.name}: " in str(error.value) for row in rows)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "name"),
    [
        (torch.bfloat16, 128, "torch_flash"),
        (torch.float16, 256, "torch_flash"),
        (torch.float32, 128, "torch_efficient"),
        (torch.bfloat16, 264, "torch_efficient"),
        (torch.float16, 100, "torch_efficient"),
        (torch.float32, 33, "torch_efficient"),
    ],
)
def test_choice_on_cuda_without_packages(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, name: str
) -> None:
    """The probe needs a device, so only its inputs in the table are tested."""
    probed: list[str] = []
    monkeypatch.setattr(table, "generation_of", lambda device: None)
    monkeypatch.setattr(table, "probe", lambda kernel, *_: probed.append(kernel.name))
    monkeypatch.setattr(table, "choose_join", lambda *_: JoinChoice(join_, "not asked"))
    choice = choose_kernel("cuda", dtype, head_dim)
    assert choice.kernel.name == name
    assert probed == [name]


def test_cuda_never_falls_back_to_all_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference keeps queries x keys scores: inputs that no other kernel takes are refused in one line."""
    monkeypatch.setattr(table, "generation_of", lambda device: None)
    monkeypatch.setattr(table, "probe", lambda *_: None)
    monkeypatch.setattr(table, "choose_join", lambda *_: JoinChoice(join_, "not asked"))
    with pytest.raises(
        ValueError, match=r"no attention kernel supports torch.float64 with head dim 64 on cuda: "
    ) as error:
        choose_kernel("cuda", torch.float64, 64)
    assert "reference: on cuda it must be named" in str(error.value)
    assert "\n" not in str(error.value)
    assert choose_kernel("cuda", torch.float64, 64, name="reference").kernel.name == "reference"
    monkeypatch.setattr(table, "probe", lambda kernel, *_: f"{kernel.name} is broken")
    with pytest.raises(ValueError, match="torch_efficient: torch_efficient is broken"):
        choose_kernel("cuda", torch.bfloat16, 64)


def test_the_kernel_joins_blocks_as_the_device_does_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason tells whether the kernel was chosen or named. On a CPU there is no alternative and no such text."""

    def fused(totals: Output, part: Output, rows: Rows) -> None:
        raise AssertionError("not called")

    monkeypatch.setattr(table, "generation_of", lambda device: None)
    monkeypatch.setattr(table, "probe", lambda *_: None)
    for choice in (JoinChoice(fused, None), JoinChoice(join_, "triton is broken")):
        monkeypatch.setattr(table, "choose_join", lambda *_, choice=choice: choice)
        for name in (None, "torch_flash"):
            kernel, reason, _ = choose_kernel("cuda", torch.bfloat16, 64, name)
            assert kernel.join is choice.join
            assert reason.endswith(
                "; the fused kernel joins blocks"
                if choice.why_not_fused is None
                else "; torch joins blocks, not the fused kernel: triton is broken"
            )
    monkeypatch.undo()
    assert choose_kernel("cpu", torch.bfloat16, 64).kernel.join is join_
    assert "joins" not in choose_kernel("cpu", torch.bfloat16, 64).reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_probe_accepts_kernels_of_this_torch(dtype: torch.dtype, head_dim: int) -> None:
    assert probe(kernel_named("cpu_flash"), CPU, dtype, head_dim) is None


def test_probe_finds_a_backward_that_takes_its_own_sum() -> None:
    """The faulty backward pass is for whole documents: it ignores the output and the sum over all keys."""
    good = kernel_named("cpu_flash")

    def backward(dout: torch.Tensor, saved: Saved, block: AttentionBlock) -> Gradients:
        own = good.forward(saved.q, saved.k, saved.v, block)
        return good.backward(dout, Saved(*saved[:3], *own), block)

    assert "differs" in str(probe(dataclasses.replace(good, backward=backward), CPU, torch.float32, 16))


def test_probe_finds_wrong_and_broken_forwards() -> None:
    good = kernel_named("cpu_flash")

    def of_nan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        out, lse = good.forward(q, k, v, block)
        return out * float("nan"), lse

    def in_base_two(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        out, lse = good.forward(q, k, v, block)
        return out, lse / torch.tensor(2.0).log()

    def rows_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        out, lse = good.forward(q, k, v, block)
        return out, lse.t()

    def without_mask(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        return good.forward(q, k, v, dataclasses.replace(block, causal=False))

    def across_documents(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        return good.forward(q, k, v, block_of([len(q)], [len(k)], block.causal, block.scale))

    def failing(*arguments: object) -> Output:
        raise TypeError("got an unexpected keyword argument")

    def refusing(*arguments: object) -> Output:
        raise AssertionError("head dim must be 64")

    for forward in (of_nan, in_base_two, rows_first, without_mask, across_documents):
        assert "differs" in str(probe(dataclasses.replace(good, forward=forward), CPU, torch.float32, 16)), forward
    assert "unexpected keyword" in str(probe(dataclasses.replace(good, forward=failing), CPU, torch.float32, 16))
    assert "must be 64" in str(probe(dataclasses.replace(good, forward=refusing), CPU, torch.float32, 16))


def test_a_kernel_that_leaves_windows_out_is_passed_over_where_layers_have_them() -> None:
    good = kernel_named("reference")

    def without_window(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        far = None if block.window is None else 1000
        return good.forward(q, k, v, dataclasses.replace(block, window=far))

    bad = dataclasses.replace(good, forward=without_window)
    assert probe(bad, CPU, torch.float32, 16) is None
    assert "differs" in str(probe(bad, CPU, torch.float32, 16, windows=True))
    for name in ("reference", "cpu_flash"):
        assert probe(kernel_named(name), CPU, torch.float32, 16, windows=True) is None


def test_a_kernel_that_fails_its_probe_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    *others, flash, reference = kernel_table()
    assert flash.name == "cpu_flash"

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: AttentionBlock) -> Output:
        out, lse = flash.forward(q, k, v, block)
        return out + 1, lse

    rows = (*others, dataclasses.replace(flash, forward=wrong), reference)
    monkeypatch.setattr("bytescale_ext.attention.kernels.table.kernel_table", lambda: rows)
    choice = choose_kernel("cpu", torch.float32, 16)
    assert choice.kernel is reference
    assert "differs from the reference" in dict(choice.considered)["cpu_flash"]
    with pytest.raises(ValueError, match="'cpu_flash' cannot be used: its probe differs"):
        choose_kernel("cpu", torch.float32, 16, name="cpu_flash")


FLASH_3 = """
def _flash_attn_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal):
    import os, sys
    sys.stderr.write("CUDA error: no kernel image")
    sys.stderr.flush()
    os._exit(1)  # as its check of a launch does
"""


@pytest.mark.ranks
def test_a_kernel_that_ends_its_process_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn_interface.py").write_text(FLASH_3)
    monkeypatch.syspath_prepend(tmp_path)
    why_not = probe(kernel_named("flash_attn_3"), CPU, torch.bfloat16, 64)
    assert why_not == "its probe ended its process with exit code 1: CUDA error: no kernel image"


@pytest.mark.ranks
def test_a_probe_in_a_child_process_returns_its_verdict() -> None:
    good = dataclasses.replace(kernel_named("cpu_flash"), is_probed_apart=True)
    assert probe(good, CPU, torch.bfloat16, 64, windows=True) is None


def test_the_child_process_prints_why_a_kernel_is_unfit(capsys: pytest.CaptureFixture[str]) -> None:
    probe_child.main("flash_attn", "cpu", "bfloat16", "64", "64")
    assert capsys.readouterr().out.startswith("its probe failed: ModuleNotFoundError: No module named 'flash_attn'")
    probe_child.main("cpu_flash", "cpu", "float32", "16", "16", "windows")
    assert capsys.readouterr().out == "\n"


def on_generation(monkeypatch: pytest.MonkeyPatch, generation: int, *installed: str) -> None:
    """Let CUDA devices have a compute capability, all probes pass, and only some packages be installed."""
    rows = [
        dataclasses.replace(row, missing=lambda name=row.name: None if name in installed else f"no {name}")
        if row.name.startswith("flash_attn")
        else row
        for row in kernel_table()
    ]
    monkeypatch.setattr(table, "kernel_table", lambda: rows)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (generation, 0))
    monkeypatch.setattr(table, "probe_here", lambda *_: None)
    monkeypatch.setattr(table, "_probe_in_child", lambda *_: None)
    monkeypatch.setattr(table, "choose_join", lambda *_: JoinChoice(join_, "not asked"))


PACKAGES = ("flash_attn", "flash_attn_3", "flash_attn_4")


@pytest.mark.parametrize(
    ("generation", "head_dim", "installed", "name"),
    [
        (8, 128, PACKAGES, "flash_attn_3"),
        (9, 128, PACKAGES, "flash_attn_3"),
        (9, 256, PACKAGES[::2], "flash_attn_4"),
        (9, 128, (), "torch_flash"),
        (10, 128, PACKAGES, "flash_attn_4"),
        (10, 128, PACKAGES[:2], "torch_cudnn"),
        (10, 192, PACKAGES, "flash_attn"),  # version 4 has 192 only with values of 128, cuDNN at most 128
        (10, 256, PACKAGES, "flash_attn_4"),
        (10, 256, (), "torch_flash"),
        (12, 128, PACKAGES, "flash_attn"),
        (12, 128, PACKAGES[2:], "flash_attn_4"),
        (12, 128, (), "torch_flash"),
    ],
)
def test_the_generation_orders_the_kernels(
    monkeypatch: pytest.MonkeyPatch, generation: int, head_dim: int, installed: tuple[str, ...], name: str
) -> None:
    on_generation(monkeypatch, generation, *installed)
    assert choose_kernel("cuda", torch.bfloat16, head_dim).kernel.name == name
    assert expected_kernels(generation, torch.bfloat16, head_dim)[0] == name


def test_expected_kernels_with_all_packages() -> None:
    found = {major: expected_kernels(major, torch.bfloat16, 128)[1] for major in (8, 9, 10, 12)}
    assert found == {8: "flash_attn_3", 9: "flash_attn_3", 10: "flash_attn_4", 12: "flash_attn"}
    assert expected_kernels(9, torch.float32, 128)[1] == "torch_efficient"


def test_generations_and_widths_that_a_kernel_lacks() -> None:
    three, four = kernel_named("flash_attn_3"), kernel_named("flash_attn_4")
    assert three.why_not_on(10, (64, 64)) == "supports compute capability 8, 9, not 10"
    assert three.why_not_on(None, (64, 64)) is None
    assert four.why_not_on(8, (64, 64)) == "supports compute capability 9, 10, 11, 12, not 8"
    assert four.why_not_on(10, (192, 192)) == (
        "on compute capability 10 it does not support head dim 192, values of 192"
    )
    assert four.why_not_on(10, (192, 128)) is four.why_not_on(9, (192, 192)) is None


def test_values_are_not_padded_where_the_kernel_takes_two_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    on_generation(monkeypatch, 10, "flash_attn_4")
    found = choose_kernel("cuda", torch.bfloat16, 192, value_dim=128)
    assert found.kernel.name == "flash_attn_4"
    assert "keys of 192 and values of 128 are not padded" in found.reason
    on_generation(monkeypatch, 10, "flash_attn")
    assert "values of 128 are padded" in choose_kernel("cuda", torch.bfloat16, 192, value_dim=128).reason
    assert "padded" not in choose_kernel("cuda", torch.bfloat16, 128, value_dim=128).reason


@pytest.mark.parametrize("widths", [(24, 16), (16, 24)])
@pytest.mark.slow
def test_keys_and_values_of_different_widths(widths: tuple[int, int]) -> None:
    """A kernel that takes both widths gets no padded tensor and does no work for padding; others get padded tensors."""
    flops, pads = {}, {}
    block = table.probe_blocks(0.2, False, on_gpu=False)[0]
    num_q, num_k = block.cu_q.num_tokens, block.cu_k.num_tokens
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(rows, 2, dim, generator=generator)
        for rows, dim in ((num_q, widths[0]), (num_k, widths[0]), (num_k, widths[1]), (num_q, widths[1]))
    )
    results = {}
    for name, unequal in (("unpadded", None), ("padded", ())):
        kernel = dataclasses.replace(kernel_named("reference"), unequal_widths=unequal)
        assert probe(kernel, CPU, torch.float32, widths[0], value_dim=widths[1]) is None
        kernel = kernel if kernel.takes(widths) else kernel.with_padding(widths)
        with FlopCounterMode(display=False) as counted, CountPads() as padded:
            out, lse = kernel.forward(q, k, v, block)
            results[name] = out, lse, *kernel.backward(dout, Saved(q, k, v, out, lse), block)
        flops[name], pads[name] = counted.get_total_flops(), padded.count
    assert [x.shape for x in results["unpadded"]] == [x.shape for x in results["padded"]]
    for one, other in zip(*results.values(), strict=True):
        torch.testing.assert_close(one, other)
    assert pads["unpadded"] == 0 < pads["padded"]
    dim, value_dim = widths  # four products with keys or queries, three with values
    assert flops["unpadded"] / flops["padded"] == pytest.approx((4 * dim + 3 * value_dim) / (7 * max(widths)), 1e-3)


class CountPads(TorchDispatchMode):
    """Counts the operators that pad tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "pad" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_gpu_is_probed_at_the_edges_of_tiles_and_with_a_long_document() -> None:
    few, many = (table.probe_blocks(0.1, True, on_gpu) for on_gpu in (False, True))
    assert many[: len(few)] == few
    lengths = {length for block in many[len(few) :] for length in block.cu_q.lengths}
    assert {63, 64, 65, 127, 128, 129, 1025} <= lengths


@pytest.mark.slow
def test_the_blocks_for_gpus_fit_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = table.probe_blocks(16**-0.5, True, True)
    monkeypatch.setattr(table, "probe_blocks", lambda scale, windows, on_gpu: blocks)
    assert probe(kernel_named("cpu_flash"), CPU, torch.float32, 16) is None
