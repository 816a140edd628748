"""Devices of trainings: CPU ranks, or with BYTESCALE_TESTS_ON=ghosts the ghost GPUs of ``tests/ghost``.

Plain processes and stock Megatron, with which a test compares, stay on the CPU: their losses come from another device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.harness import ranks_on, run_ranks

VARIABLE = "BYTESCALE_TESTS_ON"


def on_ghosts() -> bool:
    """Return whether the trainings of this session run on ghost GPUs."""
    return os.environ.get(VARIABLE) == "ghosts"


def not_on_ghosts(reason: str) -> pytest.MarkDecorator:
    """Return the mark of a test that is skipped on ghost GPUs."""
    return pytest.mark.skipif(on_ghosts(), reason=f"not on ghost GPUs: {reason}")


def run_trainings(
    function: Callable[..., Any], num_ranks: int, argv: list[Any], entry: Callable[[], None] | None, *args: Any,
    **options: Any,
) -> list[Any]:  # fmt: skip
    """Run ``function(rank, num_ranks, argv, entry, *args)`` in ranks on the devices of this session.

    Args:
        function: function of each rank that trains.
        num_ranks: number of ranks.
        argv: words of the training, or a list of words for each rank.
        entry: function that replaces ``pretrain_gpt_hdp.main``.
        args: further arguments of the function.
        options: arguments of ``run_ranks``.
    """
    from tests.e2e.oracle import train_documents_one_by_one

    is_alone = num_ranks == 1 and "--hybrid-data-parallel" not in argv
    if is_alone or entry is train_documents_one_by_one or not on_ghosts():
        return run_ranks(function, num_ranks, argv, entry, *args, **options)
    from tests.ghost.devices import GHOST_GPUS

    with ranks_on(GHOST_GPUS):
        return run_ranks(function, num_ranks, argv, partial(train_from_cpu_weights, entry), *args, **options)


def train_from_cpu_weights(entry: Callable[[], None] | None) -> None:
    """Entry that begins with the weights of a CPU rank, whose random numbers a GPU does not draw.

    With ``--use-cpu-initialization`` Megatron would leave the model on the CPU.
    """
    from megatron.training.models.gpt import GPTModelBuilder

    import pretrain_gpt_hdp

    build_model = GPTModelBuilder.build_model

    def build_on_cpu(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self._model_config.transformer
        config.use_cpu_initialization = True
        try:
            return build_model(self, *args, **kwargs).cuda()
        finally:
            config.use_cpu_initialization = False

    GPTModelBuilder.build_model = build_on_cpu
    (entry or pretrain_gpt_hdp.main)()
