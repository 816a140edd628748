"""Fixes for the start of a run: three Megatron functions that fail or waste memory, and a missing address."""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.bytescale import stores

if TYPE_CHECKING:
    from torch.distributed import TCPStore

_hosted: list[TCPStore] = []  # a store ends with its object


def use_gpu(local_rank: int) -> None:
    """Make the GPU of this rank the current device, before anything asks for the current device or uses it.

    Megatron does this when it creates the process groups. Until then every rank would use GPU 0.

    Raises:
        ValueError: this node has fewer GPUs than ranks.
    """
    number = torch.cuda.device_count()
    if local_rank >= number:
        raise ValueError(f"local rank {local_rank} needs a GPU of its own, but torch sees {number}: start fewer ranks")
    torch.cuda.set_device(local_rank)


@contextlib.contextmanager
def own_process_groups() -> Iterator[None]:
    """Destroy the process groups that a run inside has created, when it ends well.

    Megatron leaves them to the end of the process, where NCCL's watchdog reports a leak, and its flight recorder a
    timeout. After a failure peers may still wait, so nothing is destroyed.
    """
    is_own = not dist.is_initialized()
    ended_well = False
    try:
        yield
        ended_well = True
    except SystemExit as end:
        ended_well = not end.code
        raise
    finally:
        if ended_well and is_own and dist.is_initialized():
            dist.destroy_process_group()


def stand_alone() -> None:
    """Host the store of the process group, on the loopback interface, if torchrun has not started this process."""
    if os.environ.get("WORLD_SIZE", "1") == "1" and not {"MASTER_ADDR", "MASTER_PORT"} & set(os.environ):
        store = stores.hosted_store(stores.LOOPBACK, 0)
        _hosted.append(store)
        stores.use_loopback()
        os.environ |= {"MASTER_ADDR": stores.LOOPBACK, "MASTER_PORT": str(store.port)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # torch connects to the store instead of hosting one


def wrap_compile_helpers(original: Callable[[], None], runtime: object) -> Callable[[], None]:
    """Compile Megatron's dataset helper only if it is missing.

    Megatron's wheel on PyPI contains the compiled helper but no Makefile, so ``make`` fails and Megatron exits.
    """

    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


def wrap_set_jit_fusion_options(original: Callable[..., None], runtime: object) -> Callable[..., None]:
    """Skip the warm-up of the fused kernels on tensors of ``--seq-length`` rows.

    Here ``--seq-length`` is the longest context, which no rank ever holds whole. At 2M tokens the warm-up alone would
    need more memory than a GPU has.
    """

    def set_jit_fusion_options(tp_size: int | None = None) -> None:
        pass

    return set_jit_fusion_options


def wrap_warmup_jit_function(original: Callable[..., None], runtime: object) -> Callable[..., None]:
    """Skip the warm-up of CUDA kernels on CPU."""

    def warmup_jit_function(tp_size: int | None = None) -> None:
        pass

    return warmup_jit_function
