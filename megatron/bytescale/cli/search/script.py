"""The launch script that ``bytescale search`` writes."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bytescale_ext.plan.search.case import Task
from bytescale_ext.plan.search.strategy import Strategy

LAUNCHERS: Final = ("torchrun", "slurm")

NEEDED: Final = (("--attention-dropout", "0"), ("--hidden-dropout", "0"))
"""Flags of the model that hybrid data parallelism needs, and their values where the user gave none."""

_TRAIN: Final = "-m megatron.bytescale.train"
_LAUNCH: Final = '"${PYTHON:-python3}" -m megatron.bytescale.launch'
_SLURM: Final = """#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --signal=TERM@120
set -euo pipefail
rendezvous=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))
exec srun {launch} --nnodes={nodes} --nproc-per-node={per_node} \\
  --rdzv-backend=c10d --rdzv-endpoint="$rendezvous" --rdzv-id="$SLURM_JOB_ID" \\
"""
_TORCHRUN: Final = """# Start it on each of {nodes} nodes, with RENDEZVOUS=HOST:PORT of one of them.
set -euo pipefail
exec {launch} --nnodes={nodes} --nproc-per-node={per_node} \\
  --rdzv-backend=c10d --rdzv-endpoint="${{RENDEZVOUS:?give HOST:PORT of one node}}" \\
"""
_ONE_NODE: Final = """set -euo pipefail
exec {launch} --standalone --nproc-per-node={per_node} \\
"""


@dataclass(frozen=True)
class Run:
    """What the script starts.

    Attributes:
        model_flags: the user's.
        strategy_flags: what the search decided.
        context: the most tokens of a document.
        batch: documents of a step.
        cost_file: measured costs on as many tensor-parallel ranks as the strategy has; None: there are none.
        dtype: type of the parameters that the costs are of.
    """

    model_flags: Sequence[str]
    strategy_flags: Sequence[str]
    context: int
    batch: int
    cost_file: Path | None
    dtype: str

    @classmethod
    def of(cls, args: argparse.Namespace, task: Task, strategy: Strategy) -> Run:
        """Return the run of a strategy on a task; ``args``: of ``bytescale search``."""
        measured = args.cost_file if strategy.tensor_parallel == task.cost.tensor_parallel else None
        words = shlex.split(args.model_flags)
        return cls(words, strategy.flags(), task.context, task.batch, measured, task.cost.dtype)

    def flags(self) -> list[str]:
        """Return the flags of the training. Those of data, optimizer and duration are the user's to add."""
        given = {word.partition("=")[0] for word in self.model_flags}
        words = [*self.model_flags, *(word for flag in NEEDED if flag[0] not in given for word in flag)]
        words += ["--bf16"] if self.dtype == "bfloat16" and "--bf16" not in given else []
        words += ["--seq-length", str(self.context)]
        if "--max-position-embeddings" not in given:
            words += ["--max-position-embeddings", str(self.context)]
        words += ["--global-batch-size", str(self.batch)]
        words += [] if self.cost_file is None else ["--cost-file", str(self.cost_file.resolve())]
        return [*words, *self.strategy_flags]


def script_text(run: Run, devices: int, per_node: int, launcher: str, comments: Sequence[str]) -> str:
    """Return a script that starts a run; its own arguments are further flags, for example of the data."""
    nodes = -(-devices // per_node)
    start = _SLURM if launcher == "slurm" else _TORCHRUN if nodes > 1 else _ONE_NODE
    head = start.format(nodes=nodes, per_node=min(per_node, devices), launch=_LAUNCH)
    directives, _, rest = head.partition("set -euo")
    about = "".join(f"# {line}\n" for line in comments)
    flags = " \\\n  ".join(_lines(run.flags()))
    return f'#!/usr/bin/env bash\n{directives}{about}set -euo{rest}  {_TRAIN} \\\n  {flags} \\\n  "$@"\n'


def _lines(words: Sequence[str]) -> list[str]:
    """Return the words quoted for the shell, each flag with its values."""
    lines: list[str] = []
    for word in words:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines:
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return lines
