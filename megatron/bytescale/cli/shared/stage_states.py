"""Model states of each pipeline stage of a launch line: on the device, and in pages of host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bytescale_ext.config.memory.states import ResidentStates, StateConfig
from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.memory.model_states import expert_parameters, parameter_bytes
from megatron.bytescale.features.states.flags import cases

IN_HOST: Final = ("host", "pages")
"""Columns of host memory, which the total of a device leaves out: of activations, and of model states."""


def state_bytes(args: Any, run: RunConfig, parameters: Sequence[float]) -> list[dict[str, float]]:
    """Return the bytes of parameters, gradients and optimizer states of a process of each stage.

    In pages, what stays on the device and what host memory and a disk hold. Experts count where states are resident.
    ``parameters``: of each stage, without experts.
    """
    config = run.find(StateConfig)
    if config is not None:
        stages = cases(args, run, config.page_bytes, config)
        return [{"states": case.paged_bytes, "pages": float(case.host_bytes)} for case in stages]
    tensor, experts = args.expert_tensor_parallel_size, args.expert_model_parallel_size
    holders = args.world_size // (len(run.stage_layers) * tensor * experts)
    shares, element = args.use_distributed_optimizer, args.params_dtype.itemsize
    of_dense = parameter_bytes(element, run.cluster.num_ranks if shares else 1)
    of_experts = parameter_bytes(element, holders if shares else 1)
    return [
        {"states": of_dense * dense + of_experts * expert_parameters(shape, tensor, experts)}
        for dense, shape in zip(parameters, run.shape.stages(run.stage_layers), strict=True)
    ]


def choice_text(run: RunConfig) -> dict[str, str]:
    """Return how ``--state-policy auto`` has decided, in words; nothing where it was not asked."""
    found = run.find(StateConfig) or run.find(ResidentStates)
    if found is None or not found.note:
        return {}
    chosen, others = (line.partition("states auto")[2] for line in found.note.splitlines())
    return {"model states": chosen.strip(), "or": others.removeprefix(", ")}
