"""Installs the patch rows of features in a process that runs no training of ours."""

from __future__ import annotations

import functools
from typing import Any

from megatron.bytescale import install
from megatron.bytescale.arguments.parse import parse
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.core.distributed.ordered_reductions import order_reductions
from megatron.bytescale.runtime import Runtime
from tests.e2e.training import HDP, MODEL, TRAIN

_SHARDED = "--use-distributed-optimizer --overlap-grad-reduce"
_DATA = "--bf16 --data-path none"

_DOCUMENTS = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", 256]

LAUNCHES: dict[str, list[object]] = {
    "documents": [*_DOCUMENTS, *f"{_DATA} {_SHARDED} --state-policy paged --state-host-gb 1".split()],
    "predictions": [*_DOCUMENTS, *f"{_DATA} --mtp-num-layers 1".split()],
    "slices": [*MODEL, *TRAIN, *f"{_DATA} --micro-batch-size 1 --seq1f1b-slices 2".split()],
}
"""Launch lines; together they install every row for GPUs."""


def install_rows(words: list[object]) -> Runtime:
    """Install the rows of a launch line as ``pretrain_gpt_hdp.py`` does, up to the build of the model.

    Later DDP modules get ordered reductions, whose class is a row too. No step runs, so their gate stays open.
    """
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
    from megatron.training.global_vars import destroy_global_vars

    runtime = Runtime.of(resolve(parse(["peer_tests.py", *map(str, words)], on_cpu=False)))
    install(runtime)
    destroy_global_vars()  # tests begin without arguments
    unset_num_microbatches_calculator()
    begin = DistributedDataParallel.__init__

    @functools.wraps(begin)
    def begin_ordered(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        order_reductions(runtime, [self])

    DistributedDataParallel.__init__ = begin_ordered
    return runtime
