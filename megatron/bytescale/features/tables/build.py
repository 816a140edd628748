"""Tables in host memory in training: rows are read when a step begins, and gradients are sent when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch

from bytescale_ext.data.loading.step import StepBatch
from megatron.bytescale.core.models.common.embeddings.host_table import TablesOfStep
from megatron.bytescale.runtime import Runtime
from megatron.bytescale.training.pretrain_arguments import Training
from megatron.bytescale.training.stock import ForwardStep, LossFunction


def keep_tables(
    training: Training, runtime: Runtime, kind: type[torch.nn.Module], rows_of: Callable[[StepBatch], np.ndarray]
) -> Training:
    """Read and update the tables of the modules of a kind; ``rows_of`` returns the rows int64 [n] of a step."""
    tables = TablesOfStep(lambda module: isinstance(module, kind), rows_of)
    training.model.pre_wrap_hooks.append(tables.collect)

    def read_rows_first(forward: ForwardStep) -> ForwardStep:
        def read_and_forward(
            data_iterator: Iterator[object], model: torch.nn.Module
        ) -> tuple[torch.Tensor, LossFunction]:
            assert runtime.step.batch is not None
            tables.begin(runtime.step.batch, model.training, runtime.step.next_batch)
            return forward(data_iterator, model)

        return read_and_forward

    def send_rows_last(finalize: Callable[..., object]) -> Callable[..., object]:
        def finalize_and_send(
            model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, *args: object, **kwargs: object
        ) -> None:
            finalize(model, num_tokens, *args, **kwargs)  # which adds up the labels of all ranks
            assert num_tokens is not None, "losses are summed over tokens"
            tables.end(num_tokens)

        return finalize_and_send

    return training.wrap_forward_step(read_rows_first).wrap_finalize(send_rows_last)
