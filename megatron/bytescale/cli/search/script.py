"""The launch script that ``bytescale search`` writes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.plan.search.costs import parallel_cost
from bytescale_ext.plan.search.strategy import Strategy
from bytescale_ext.plan.search.task import Task
from megatron.bytescale.cli.search.task import launched_words
from megatron.bytescale.cli.shared.model_flags import given_flags

LAUNCHERS: Final = ("torchrun", "slurm")

_TRAIN: Final = "-m megatron.bytescale.train"
_FOLDER: Final = """folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # the cost file is in the folder of this script
"""
_SLURM_FOLDER: Final = """script=${BASH_SOURCE[0]}
if [[ ${script##*/} == slurm_script ]]; then # a copy: scontrol shows the path of the original, and its arguments
  script=$(scontrol show job "$SLURM_JOB_ID")
  script=${script#*$'\\n   Command='}
  script=${script%%$'\\n   WorkDir='*}
  while [[ ! -f $script && $script == *' '* ]]; do script=${script% *}; done
fi
folder=$(cd "$(dirname "$script")" && pwd) # the cost file is in the folder of this script
"""
_LAUNCH: Final = '"${PYTHON:-python3}" -P -m megatron.bytescale.launch'
_SLURM: Final = """#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={per_node}
#SBATCH --signal=TERM@120
set -euo pipefail
rendezvous=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1):$((20000 + SLURM_JOB_ID % 10000))
rendezvous_id=$SLURM_JOB_ID-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')
exec srun {launch} --nnodes={nodes} --nproc-per-node={per_node} \\
  --rdzv-backend=c10d --rdzv-endpoint="$rendezvous" --rdzv-id="$rendezvous_id" \\
"""
_TORCHRUN: Final = """# Start it on each of {nodes} nodes, with RENDEZVOUS=HOST:PORT of one of them, and with the same
# RENDEZVOUS_ID, a text that other users of the cluster cannot guess: torch unpickles what other members write.
set -euo pipefail
exec {launch} --nnodes={nodes} --nproc-per-node={per_node} \\
  --rdzv-backend=c10d --rdzv-endpoint="${{RENDEZVOUS:?give HOST:PORT of one node}}" \\
  --rdzv-id="${{RENDEZVOUS_ID:?give one random text for all nodes, such as the output of openssl rand -hex 16}}" \\
"""
_ONE_NODE: Final = """set -euo pipefail
exec {launch} --standalone --nproc-per-node={per_node} \\
"""


@dataclass(frozen=True)
class ScriptedRun:
    """The training that a script starts.

    Attributes:
        model_flags: flags of the model.
        strategy_flags: flags of the strategy.
        seq_length: the most tokens of a document.
        batch: documents of a step.
        cost_file: name of the strategy's cost file in the folder of the script; None: training plans with the costs
            of a known device.
    """

    model_flags: Sequence[str]
    strategy_flags: Sequence[str]
    seq_length: int
    batch: int
    cost_file: str | None

    @classmethod
    def of(cls, flags: str, task: Task, strategy: Strategy, cost_file: str | None = None) -> ScriptedRun:
        """Return the run of a strategy on a task; ``flags`` are the user's flags of the model."""
        words = launched_words(flags, task.cost.dtype)
        return cls(words, strategy.flags(), task.context, task.batch, cost_file)

    def flags(self) -> list[str]:
        """Return the flags of the training, without the cost file and flags of data, optimizer and duration."""
        words = [*self.model_flags, "--seq-length", str(self.seq_length)]
        if "--max-position-embeddings" not in given_flags(self.model_flags):
            words += ["--max-position-embeddings", str(self.seq_length)]
        words += ["--global-batch-size", str(self.batch)]
        return [*words, *self.strategy_flags]


def write_costs(path: Path, task: Task, strategy: Strategy) -> None:
    """Write the cost file of a strategy, with which the training plans as the search did.

    It has the costs of the task on the strategy's tensor-parallel ranks. Raises OSError if it cannot be written.
    """
    cost = parallel_cost(task.cost, strategy, task.operators)
    write_cost(path, replace(cost, source=f"{cost.source}; for {strategy}"))


def script_text(run: ScriptedRun, num_ranks: int, per_node: int, launcher: str, comments: Sequence[str]) -> str:
    """Return a script that starts a run; its arguments are further flags, such as the flags of the data.

    The script and its cost file run from any folder that both are copied to.
    """
    nodes = -(-num_ranks // per_node)
    start = _SLURM if launcher == "slurm" else _TORCHRUN if nodes > 1 else _ONE_NODE
    head = start.format(nodes=nodes, per_node=min(per_node, num_ranks), launch=_LAUNCH)
    directives, strict, rest = head.partition("set -euo pipefail\n")
    about = "".join(f"# {line}\n" for line in comments)
    lines = _lines(run.flags())
    if run.cost_file is not None:
        rest = (_SLURM_FOLDER if launcher == "slurm" else _FOLDER) + rest
        lines.append(f'--cost-file "$folder"/{shlex.quote(run.cost_file)}')
    flags = " \\\n  ".join(lines)
    return f'#!/usr/bin/env bash\n{directives}{about}{strict}{rest}  {_TRAIN} \\\n  {flags} \\\n  "$@"\n'


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
