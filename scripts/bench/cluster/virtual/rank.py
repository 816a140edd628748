"""The program of one rank of a recording: pretrain_gpt_hdp.py with the hooks of ``record.py``.

``BYTESCALE_RECORD`` names the folder of the recording. ``BYTESCALE_PLANS=hybrid`` runs Megatron's hybrid plan, and
``BYTESCALE_PLANS=dynamic`` the dynamic plan of the source tree ``BYTESCALE_MEGATRON``. ``BYTESCALE_PLANS=copies``
computes the prompt of a group with each of its documents, and so does ``BYTESCALE_PLANS=equal``, with plans of ranks
with equally many documents.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[4]))  # so that it also runs as a file

COPIES, EQUAL = "copies", "equal"

if TYPE_CHECKING:
    import torch

    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training
    from scripts.bench.cluster.virtual.record import Recorder


def record(training: Training, runtime: Runtime, recorder: Recorder) -> Training:
    """Install the hooks of a recording. Messages and layers are recorded in training steps only."""
    from bytescale_ext.attention.ring import RingAttention
    from bytescale_ext.attention.slices import SliceAttention
    from megatron.bytescale.core.distributed.ordered_reductions import OrderedBucketGroup
    from scripts.bench.cluster.virtual import record as hooks
    from scripts.bench.cluster.virtual.dense import dense_backward, dense_forward

    parameters: list[int] = []
    runtime.log.rests = deque(maxlen=0)  # seconds outside of passes are this host's; the replay has none of them

    def prepare(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        kernel = runtime.parts.kernel
        assert kernel is not None
        dense = replace(kernel, forward=dense_forward, backward=dense_backward)
        forward, backward = hooks.record_kernel(dense, recorder)
        runtime.add_parts(kernel=replace(dense, forward=forward, backward=backward))
        for chunk in chunks:
            parameters.append(sum(parameter.numel() for parameter in chunk.parameters()))
            hooks.record_layers(chunk, list(chunk.decoder.layers), recorder)  # type: ignore[union-attr,arg-type]
        return chunks

    training.model.pre_wrap_hooks.append(prepare)
    for owner in (RingAttention, SliceAttention):
        hooks.record_attention(owner, recorder)
    hooks.record_travel(recorder)
    hooks.record_messages(recorder)
    hooks.record_gradients(OrderedBucketGroup.__bases__[0], recorder)  # Megatron's own class
    hooks.record_steps(
        sys.modules["megatron.training.training"], recorder, lambda: sum(parameters), lambda: runtime.step.batch
    )
    return training


def main() -> None:
    """Train with the flags of the command line and write the events."""
    from megatron.bytescale import train
    from megatron.bytescale.features.hdp import build
    from scripts.bench.cluster.dynamic import DynamicPlanner
    from scripts.bench.cluster.hybrid import use_hybrid_plans, use_planner
    from scripts.bench.cluster.virtual.cases import DYNAMIC, HYBRID
    from scripts.bench.cluster.virtual.events import write_events
    from scripts.bench.cluster.virtual.planned_once import PlannedOnce
    from scripts.bench.cluster.virtual.record import Recorder

    recorder, folder = Recorder(), Path(os.environ["BYTESCALE_RECORD"])
    in_process = build.PlannerInProcess
    build.PlannerInProcess = lambda planner: in_process(PlannedOnce(planner, folder))
    if os.environ["BYTESCALE_PLANS"] in (COPIES, EQUAL):
        from scripts.bench.cluster.virtual.equal import EqualPlanner

        build.computes_prompts_once = lambda runtime: False
        if os.environ["BYTESCALE_PLANS"] == EQUAL:
            build.planner_of = lambda decision: EqualPlanner(decision.setup.cluster, decision.setup.cost.whole())

    def adapt(training: Training, runtime: Runtime) -> Training:
        if os.environ["BYTESCALE_PLANS"] == HYBRID:
            training = use_hybrid_plans(training, runtime)
        elif os.environ["BYTESCALE_PLANS"] == DYNAMIC:
            planner = DynamicPlanner(runtime.run.cluster, Path(os.environ["BYTESCALE_MEGATRON"]))
            training = use_planner(training, runtime, planner)
        return record(training, runtime, recorder)

    train.main(adapt)
    write_events(folder / f"rank{os.environ['RANK']}.events", recorder.events)


if __name__ == "__main__":
    from scripts.bench.cluster.virtual import rank  # pickling the hybrid planner needs a module with a name

    rank.main()
