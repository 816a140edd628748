"""Megatron's optimizers with Adam states in pages of host memory and disk.

Megatron reduces and clips gradients and computes their norm as before. Then ``PagedAdam`` updates, and copies each
updated page to the model's parameters. This replaces Megatron's own copy to the parameters.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Final

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

from bytescale_ext.config.memory.states import StateConfig
from bytescale_ext.plan.states.moves import traffic
from bytescale_ext.states.adam import PagedAdam, PagedParameter
from bytescale_ext.states.group_counts import GroupCountingAdam
from bytescale_ext.states.lock_free import LockFreeAdam
from megatron.bytescale.registry import specialize

if TYPE_CHECKING:
    from megatron.core.optimizer.optimizer import MegatronOptimizer


@cache
def paged(kind: type[MegatronOptimizer]) -> type[MegatronOptimizer]:
    """Return the subclass for an optimizer of Megatron that has float32 copies of its parameters.

    Its ``paged_adam`` keeps these copies in pages too. It has the only base ``kind``, which ``specialize`` needs.
    """

    class Paged(kind):  # type: ignore[misc]
        def prepare_grads(self) -> bool:
            """Attach the gradients, which are on the device, or in host memory from stage 2 on."""
            self.paged_adam.begin_step()
            return bool(super().prepare_grads())

        def _copy_main_params_to_model_params(self) -> None:
            """Do nothing, because each page is copied when it is updated."""

        def _copy_model_params_to_main_params(self, state_dict: object = None) -> None:
            """Copy parameters loaded from a checkpoint without an optimizer to the pages."""
            self.paged_adam.lend(self.optimizer, changed=True)
            super()._copy_model_params_to_main_params(state_dict=state_dict)

        def save_parameter_state(self, filename: str) -> None:
            """Save the states; Megatron reads them before it asks torch's optimizer for its state."""
            self.paged_adam.lend(self.optimizer, changed=False)
            super().save_parameter_state(filename)

    return Paged


HAVE_COPIES: Final = (Float16OptimizerWithFloat16Params, DistributedOptimizer)
"""Megatron's optimizers with float32 copies of parameters; ``FP32Optimizer`` has none and keeps its class."""


def page_parts(parts: Sequence[MegatronOptimizer], config: StateConfig, on_cuda: bool) -> None:
    """Move the states of all of the optimizer's parts that have parameters to pages.

    Raises ValueError if the pages exceed the limit of host memory or disk space.
    """
    by_part = {number: parameters for number, part in enumerate(parts) if (parameters := paged_parameters(part))}
    sizes = {number: sum(paged.parameter.numel() for paged in parameters) for number, parameters in by_part.items()}
    for number, parameters in by_part.items():
        part = parts[number]
        share = config.share(sizes[number] / sum(sizes.values()), any(paged.has_copy for paged in parameters))
        kind = LockFreeAdam if config.update_steps else PagedAdam
        part.paged_adam = kind(part.optimizer, parameters, share, on_cuda, number)
        if type(part) in HAVE_COPIES:
            specialize(part, paged)
        config = config.without(part.paged_adam.host_bytes, part.paged_adam.file_bytes)
        del sizes[number]
        if part.paged_adam.tiers is not None:
            assert config.nvme is not None
            part.paged_adam.tiers.report_failure = partial(save_and_stop, config.nvme.exit_signal)
            print(f"> bytescale: {described(part.paged_adam)}", flush=True)


def use_torch_adam(parts: Sequence[MegatronOptimizer]) -> None:
    """Replace the Adam of TransformerEngine or Apex in all parts by torch's; Megatron prefers these if installed."""
    for part in parts:
        if not part.is_stub_optimizer and not isinstance(part.optimizer, torch.optim.Adam):
            part.optimizer = GroupCountingAdam.taking_over(part.optimizer, part.config.decoupled_weight_decay)


def described(paged_adam: PagedAdam) -> str:
    """Return a log line about the pages on disk."""
    assert paged_adam.tiers is not None
    file, on_disk = paged_adam.tiers.file, paged_adam.on_disk
    written = traffic(paged_adam.table, 0, on_disk).on_disk
    cache_note = "" if file.is_direct else ", through the system's cache: its file system has no direct I/O"
    return (
        f"{len(on_disk):,} of {len(paged_adam.table.pages):,} pages in {file.path}, a file of "
        f"{paged_adam.file_bytes / 1e9:.3f} GB; {written / 1e9:.3f} GB read and written a step{cache_note}"
    )


def save_and_stop(exit_signal: int, failure: str) -> None:
    """Print that a disk takes no more pages; then make the run save and stop after this step, as on a signal."""
    print(f"bytescale: {failure}. This step is complete; the run saves it and stops", file=sys.stderr, flush=True)
    signal.raise_signal(exit_signal)


def paged_parameters(part: MegatronOptimizer) -> list[PagedParameter]:
    """Return the parameters of a part in its order, each paired with the model parameter that it updates."""
    if part.is_stub_optimizer:
        return []
    of_model, copies = [], []
    if isinstance(part, DistributedOptimizer):
        of_model, copies = part.shard_float16_groups, part.shard_fp32_from_float16_groups
    elif isinstance(part, Float16OptimizerWithFloat16Params):
        of_model, copies = part.float16_groups, part.fp32_from_float16_groups
    targets = {
        copy: target
        for of_group, of_copies in zip(of_model, copies, strict=True)
        for target, copy in zip(of_group, of_copies, strict=True)
    }
    parameters = [parameter for group in part.optimizer.param_groups for parameter in group["params"]]
    return [PagedParameter(parameter, targets.get(parameter, parameter).detach().view(-1)) for parameter in parameters]
