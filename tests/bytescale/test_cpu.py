"""Replacements of CUDA functions on a machine without CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.bytescale import cpu
from tests.harness import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests the machine without a GPU")


MEGATRON_FUNCTIONS = [
    "megatron.core.tensor_parallel.random._get_cuda_rng_state",
    "megatron.core.tensor_parallel.random._set_cuda_rng_state",
    "megatron.training.initialize._warmup_jit_function",
]


def owned(rows: list[tuple[Any, str, Any]]) -> list[Any]:
    """Return the attribute of each owner under each name, or ``cpu`` if it has none."""
    return [vars(owner).get(name, cpu) for owner, name, _ in rows]


def install_and_uninstall(rank: int, world: int) -> None:
    from tests.e2e.preload import STAND_INS

    assert STAND_INS is not None
    assert cpu.installed()
    STAND_INS.uninstall()
    assert not cpu.installed()
    assert not torch.cuda.is_available()
    rows = cpu._torch_rows()
    before = owned(rows)
    assert len({(id(owner), name) for owner, name, _ in rows}) == len(rows) > 40
    assert cpu in before, "some are inherited"
    stand_ins = cpu.install_if_wanted(["--cpu"])
    assert stand_ins is not None
    assert cpu.installed()
    assert torch.cuda.is_available()
    assert stand_ins.megatron.names() == MEGATRON_FUNCTIONS
    assert all(now is not was for now, was in zip(owned(rows), before, strict=True))
    replaced = owned(rows)
    # A second call finds them installed, and removing its (empty) set changes nothing.
    again = cpu.install_if_wanted([])
    assert again is not None
    again.uninstall()
    assert all(now is was for now, was in zip(owned(rows), replaced, strict=True))
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    stand_ins.uninstall()
    assert stand_ins.megatron.names() == []
    for (owner, name, _), now, was in zip(rows, owned(rows), before, strict=True):
        assert now is was, f"{owner} {name}"
    assert torch.device("cuda").type == "cuda"
    assert torch.zeros(1).type() == "torch.FloatTensor"
    stand_ins.uninstall()


@pytest.mark.ranks
def test_uninstall_restores_every_attribute() -> None:
    run_ranks(install_and_uninstall, 1, init_group=False)


def refuse_another_megatron(rank: int, world: int) -> None:
    import megatron.training.initialize as initialize

    from tests.e2e.preload import STAND_INS

    assert STAND_INS is not None
    STAND_INS.uninstall()
    initialize._warmup_jit_function = print
    with pytest.raises(ValueError, match=r"_warmup_jit_function of megatron-core .* has the source hash none"):
        cpu.install_if_wanted(["--cpu"])
    assert not cpu.installed()
    assert initialize._warmup_jit_function is print


@pytest.mark.ranks
def test_another_megatron_leaves_no_stand_in() -> None:
    run_ranks(refuse_another_megatron, 1, init_group=False)


def use_devices() -> None:
    cuda = torch.device("cuda", 0)
    assert torch.device("cuda").type == "cpu" == cuda.type
    for device in ("cuda", "cuda:1", cuda, torch.cuda.current_device()):
        assert torch.empty(2, device=device).device.type == "cpu"
        assert torch.zeros(2).to(device).device.type == "cpu"
        assert torch.zeros(2).to(device=device).device.type == "cpu"
        assert torch.arange(3, device=device).tolist() == [0, 1, 2]
    assert torch.device("meta").type == "meta"
    assert torch.empty(1, device="meta").is_meta
    assert torch.zeros(2).to(torch.float64).dtype == torch.float64
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    assert tensor.cuda() is tensor
    assert tensor.cuda(0, non_blocking=True) is tensor
    assert tensor.pin_memory() is tensor
    assert module.cuda() is module
    assert module.to("cuda").weight.device.type == "cpu"
    with torch.cuda.device(0):
        torch.cuda.set_device(0)
    assert torch.cuda.device_count() == 1
    assert torch.cuda.get_device_properties(0).multi_processor_count == 1
    assert torch.cuda.get_device_capability() == (0, 0)
    assert torch.cuda.memory_allocated() == 0
    stats = torch.cuda.memory_stats()
    stats["num_alloc_retries"] = 7
    assert torch.cuda.memory_stats()["num_alloc_retries"] == 0


def use_streams() -> None:
    stream, event = torch.cuda.Stream(priority=-1), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream):
        torch.zeros(2).record_stream(stream)
    assert stream.record_event(event) is event
    assert isinstance(stream.record_event(), torch.cuda.Event)
    stream.wait_event(event)
    stream.wait_stream(torch.cuda.current_stream())
    torch.cuda.default_stream().synchronize()
    event.record(stream)
    event.wait()
    event.synchronize()
    assert event.query()
    assert stream.query()
    assert event.elapsed_time(event) == 0.0
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("name")
    torch.cuda.nvtx.range_pop()

    @torch.compile(dynamic=True)
    def double(value: Any) -> Any:
        return 2 * value

    assert double(3) == 6
    assert torch.compile(abs) is abs


def use_random_states() -> None:
    import megatron.core.tensor_parallel.random as parallel_random

    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.cuda.manual_seed_all(5)
    assert torch.equal(torch.rand(3), first)
    parallel_random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    parallel_random._set_cuda_rng_state(state, graph_safe=True)
    assert torch.equal(parallel_random._get_cuda_rng_state(device="cuda", clone=True), state)
    # Megatron's tracker has a separate state for values that differ between tensor-parallel ranks.
    tracker = parallel_random.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("model-parallel-rng", 11)
    torch.cuda.set_rng_state(state)
    with tracker.fork():
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), first)
    assert not torch.equal(inside, first)
    with tracker.fork():
        assert not torch.equal(torch.rand(3), inside)


def use_type_names() -> None:
    assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.nn.Parameter(torch.zeros(1)).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type("torch.cuda.DoubleTensor").dtype == torch.float64
    assert torch.zeros(1).type("torch.IntTensor").dtype == torch.int32


def use_all(rank: int, world: int) -> None:
    use_devices()
    use_streams()
    use_random_states()
    use_type_names()


@pytest.mark.ranks
def test_cuda_means_cpu() -> None:
    run_ranks(use_all, 1, init_group=False)


def exchange(rank: int, world: int, as_tensors: bool) -> list[float]:
    """Rank r sends r + 1 numbers to rank 0 and one to rank 1."""
    sent, received = [rank + 1, 1], [[1, 2], [1, 1]][rank]
    sizes = [torch.tensor(size) if as_tensors else size for size in (received, sent)]
    output = torch.empty(sum(received))
    dist.all_to_all_single(output, torch.full((sum(sent),), float(rank)), *sizes)
    return output.tolist()


@pytest.mark.ranks
@pytest.mark.parametrize("as_tensors", [False, True])
def test_all_to_all_takes_split_sizes_as_tensors(as_tensors: bool) -> None:
    assert run_ranks(exchange, 2, as_tensors) == [[0.0, 1.0, 1.0], [0.0, 1.0]]


def gather_and_scatter(rank: int, world: int) -> tuple[list[float], list[float]]:
    """Rank r gathers r + 1 numbers, and scatters three numbers: one for rank 0 and two for rank 1."""
    gathered = torch.empty(3)
    dist.all_gather(list(gathered.split([1, 2])), torch.full((rank + 1,), float(rank)))
    reduced = torch.empty(rank + 1)
    mine = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    dist.reduce_scatter(reduced, list(mine.split([1, 2])))
    assert mine.tolist() == [rank + 1.0, 2 * (rank + 1.0), 3 * (rank + 1.0)], "the input is left as it was"
    return gathered.tolist(), reduced.tolist()


@pytest.mark.ranks
def test_gather_and_scatter_of_unequal_sizes() -> None:
    assert run_ranks(gather_and_scatter, 2) == [([0.0, 1.0, 1.0], [3.0]), ([0.0, 1.0, 1.0], [6.0, 9.0])]


def test_wanted_without_a_gpu_or_by_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cpu.wanted([])
    assert cpu.wanted(["--cpu"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert not cpu.wanted(["pretrain_gpt_hdp.py"])
    assert cpu.wanted(["--cpu"])
    assert cpu.install_if_wanted(["pretrain_gpt_hdp.py"]) is None
    assert not cpu.installed()
