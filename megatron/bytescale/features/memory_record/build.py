"""Records the first step of every rank of a pipeline and plans its memory (``--record-memory-plan``; MEMO section 4.2).

Each rank traces the allocations of its own work: micro-batches and slices in its schedule's order, several in flight.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.training.utils import print_rank_0

from bytescale_ext.activation.trace import AllocationTrace, watch_passes
from bytescale_ext.errors import one_line
from bytescale_ext.new_file import write_text
from bytescale_ext.plan.memory.check import check_covers, check_two_level_plan
from bytescale_ext.plan.memory.passes import plan_step
from bytescale_ext.plan.memory.placement import liveness_bound
from bytescale_ext.plan.memory.plan_file import PlanFile, RecordTo
from bytescale_ext.plan.memory.step_file import StepMemory
from megatron.bytescale.features.activations.activation_memory import FirstStep, around_steps, role_of, store_of
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training


@dataclass
class StepRecorder:
    """Records the first training step of this process.

    Attributes:
        target: settings of the step, and the output file.
        role: stage and tensor-parallel rank.
        step: trace of the step.
        is_planned: whether this process plans; pipelines of other HDP ranks would make equal plans.
        text: role as text for messages.
    """

    target: RecordTo
    role: tuple[int, int]
    step: FirstStep
    is_planned: bool
    text: str
    _is_done: bool = field(default=False, init=False)

    @classmethod
    def of(cls, runtime: Runtime) -> StepRecorder:
        """Return the recorder of a run, before its first step."""
        target, process = runtime.run.get(RecordTo), runtime.run.process
        role = process.stage, process.tensor_rank
        step, text = FirstStep(store_of(runtime)), role_of(runtime, target.record)
        return cls(target, role, step, process.hdp_rank == 0, text)

    def around(self, training: Training) -> Training:
        """Return a training that records its first step."""
        training.model.pre_wrap_hooks.append(self.watch)
        return around_steps(training, self.begin, self.end)

    def watch(self, model_chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Hook in ``ModelConfig.pre_wrap_hooks``: record the passes of all layers."""
        self.step.chunks = model_chunks
        for chunk in model_chunks:
            for layer in chunk.decoder.layers:  # type: ignore[union-attr]
                watch_passes(layer, int(layer.layer_number) - 1, lambda: self.step.trace)
        return model_chunks

    def begin(self, model: torch.nn.Module) -> None:
        """Start to record, in the first forward pass of the run."""
        if not self._is_done and self.step.trace is None:
            self.step.begin(model)

    def end(self) -> None:
        """Plan the step after its last backward pass, and write the plans of all ranks. Collective."""
        if self._is_done:
            return
        self._is_done = True
        trace = self.step.end()
        mine = (self.role, self.planned(trace)) if self.is_planned else None
        everyones: list[tuple[tuple[int, int], StepMemory] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(everyones, mine)
        if dist.get_rank() == 0:
            plans = PlanFile.of(dict(plan for plan in everyones if plan is not None))
            write_text(self.target.path, json.dumps(plans.to_json()) + "\n")
        print_rank_0(f"> bytescale: memory plans written to {one_line(self.target.path)}")

    def planned(self, trace: AllocationTrace) -> StepMemory:
        """Return the checked memory plan of the step, and print its peak."""
        requests = trace.requests()
        plan = plan_step(requests, trace.passes).best
        check_two_level_plan(plan)
        check_covers(plan, requests)
        model = plan.model
        print(
            f"> bytescale: memory plan{self.text}: {len(requests)} allocations of a step, {model.peak / 1e6:.3f} MB "
            f"planned, {liveness_bound(requests) / 1e6:.3f} MB live at most",
            flush=True,
        )
        return StepMemory(self.target.record, self.step.store.counts.restored_bytes, plan)
