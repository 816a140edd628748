"""Runs a planned step through Megatron's own schedule."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from megatron.core import parallel_state

from bytescale_ext.data.packed import dummy_micro_batch
from bytescale_ext.metrics import append_jsonl
from megatron.bytescale.runtime import HdpRuntime


def wrap_get_forward_backward_func(original: Callable[..., Any], runtime: HdpRuntime) -> Callable[..., Any]:
    """Hand Megatron's schedule this rank's micro-batches of the step, however many there are.

    One item of the data iterator is a whole step. A rank without micro-batches runs one of padding alone, with
    no weight in the loss: so it joins every collective of the step, whatever overlaps with what.
    """

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Callable[..., Any]:
        schedule = original(*args, **kwargs)

        def forward_backward(*, data_iterator: Any, num_microbatches: int, model: Any, **kwargs: Any) -> Any:
            iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
            chunk = model[0] if isinstance(model, list) else model
            training = not kwargs.get("forward_only", False)
            begin_step(runtime, next(iterator), chunk, training)
            assert runtime.step is not None
            micro_batches = runtime.step.micro_batches or (dummy_micro_batch(runtime.config.rows_multiple),)
            result = schedule(
                data_iterator=enumerate(micro_batches), num_microbatches=len(micro_batches), model=model, **kwargs
            )
            end_step(runtime, training)
            return result

        return forward_backward

    return get_forward_backward_func


def begin_step(runtime: HdpRuntime, step: Any, model_chunk: Any, training: bool) -> None:
    """Make ``step`` the running one and start its clock.

    With ``--overlap-param-gather`` all parameter gathers are started here. Megatron would start each from the
    layer before it; but a rank that waits in a ring does not reach its next layer, and a rank that waits for
    that layer's parameters does not reach the ring.
    """
    runtime.step = step
    if not training:
        return
    runtime.reset_counts()
    runtime.step_started = time.perf_counter()
    runtime.clock.begin(traced=step.step_index + 1 == runtime.config.timeline_step)
    gather = model_chunk.config.param_sync_func
    if gather is not None:
        for start in gather if isinstance(gather, list) else [gather]:
            start(model_chunk.parameters())


def end_step(runtime: HdpRuntime, training: bool) -> None:
    """Count the step's figures, and write its timeline if this is the step asked for."""
    if not training:
        return
    runtime.clock.mark("end")
    runtime.count_step()
    step, config = runtime.step, runtime.config
    assert step is not None
    first_of_tensor_group = parallel_state.get_tensor_model_parallel_rank() == 0  # one file for each HDP rank
    if runtime.clock.traced and config.log_dir is not None and first_of_tensor_group:
        mine = step.plan.ranks[runtime.rank]
        spans = runtime.clock.spans(step.step_index + 1, runtime.rank, mine, step.lengths)
        append_jsonl(config.log_dir / "timeline" / f"rank{runtime.rank}.jsonl", spans)


def wrap_finalize_model_grads(original: Callable[..., Any], runtime: HdpRuntime) -> Callable[..., Any]:
    """``config.finalize_model_grads_func``: Megatron's own, with the moment noted at which the work ends."""

    def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
        runtime.clock.mark("reduce")
        return original(*args, **kwargs)

    return finalize_model_grads
