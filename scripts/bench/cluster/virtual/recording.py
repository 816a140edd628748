"""Run the real training of an arm on CPU ranks, forks of this process, and return their programs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np

from bytescale_ext.measure.cost_file import write_cost
from bytescale_ext.new_file import new_log
from bytescale_ext.plan.cost.model_shape import ModelShape
from scripts.bench.cluster.virtual.cases import SCALE, Arm, Case
from scripts.bench.cluster.virtual.events import Programs, read_events
from scripts.bench.cluster.virtual.times import DeviceTimes, HostTimes, ModelTimes, planned_cost
from scripts.cluster.ranks import ForkedRank, fork, run_warm, torchrun_variables

RECORDED: Final = ModelShape(1, 32, 2, 1, 16, 64, True, 384)
"""Recorded model of a stage: one layer, which stands for all layers of the stage."""

MODEL: Final = (
    "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 2 --group-query-attention --num-query-groups 1 "
    "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--tokenizer-type NullTokenizer --vocab-size 257 --cpu --ddp-bucket-size 10000"
).split()
TRAIN: Final = (
    "--lr 1e-3 --clip-grad 1.0 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
    "--log-interval 1 --log-throughput --eval-iters 0 --eval-interval 1000 --split 100,0,0 "
    "--no-check-for-nan-in-loss-and-grad --hybrid-data-parallel --hdp-learn-costs off"
).split()


@dataclass(frozen=True)
class Recording:
    """Settings of a recording.

    Attributes:
        folder: folder of its files.
        device: device whose times the plans follow.
        num_steps: steps of a run; the first does not count.
        seed: seed of lengths and tokens.
        megatron: source tree of Megatron whose dynamic plans run.
        gbps: Gbit/s of each device between nodes that plans are made for.
    """

    folder: Path
    device: DeviceTimes
    num_steps: int
    seed: int = 0
    megatron: Path | None = None
    gbps: float = 400.0

    def times(self, case: Case, arm: Arm) -> ModelTimes:
        """Return the times of the modelled model."""
        host, replicas = HostTimes.read(arm.slicing.num_slices > 1), case.num_ranks // arm.num_stages
        recorded = replace(RECORDED, num_layers=arm.num_stages)
        return ModelTimes(case.shape, recorded, self.device, host, SCALE, arm.num_stages, replicas)

    def documents(self, case: Case) -> tuple[Path, int]:
        """Write the documents of a case, random tokens; return their prefix and their number in a step."""
        from megatron.bytescale.core.datasets.corpus import write_tokens

        lengths = case.lengths(self.num_steps, self.seed)
        name = f"{case.sampler}-{case.context}-{case.num_ranks}-{self.num_steps}-{self.seed}"
        prefix = self.folder / name
        if not prefix.with_suffix(".idx").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            random = np.random.default_rng(self.seed)
            write_tokens(prefix, (random.integers(0, 256, length) for length in lengths))
        return prefix, len(lengths) // self.num_steps

    def command(self, case: Case, arm: Arm, folder: Path) -> tuple[str, ...]:
        """Return the command of every rank, after its cost file is written."""
        cost = planned_cost(self.times(case, arm), self.gbps * 1e9 / 8)
        write_cost(folder / "cost.json", cost)
        prefix, num_documents = self.documents(case)
        words = [*MODEL, "--num-layers", arm.num_stages, *TRAIN, *arm.words(case), "--cost-file", folder / "cost.json"]
        words += ["--seq-length", case.context // SCALE, "--max-position-embeddings", case.context // SCALE]
        words += ["--data-path", prefix, "--global-batch-size", num_documents, "--train-iters", self.num_steps]
        words += ["--seed", 1 + self.seed, "--hdp-log-dir", folder, "--tensorboard-dir", folder]
        script = Path(__file__).parent / "rank.py"
        return tuple(map(str, (script, *words)))

    def run(self, case: Case, arm: Arm, folder: Path) -> Programs:
        """Train, and return the programs of all ranks. ``scripts.cluster.ranks.preload`` must have been called.

        Raises:
            RuntimeError: a rank failed; the message holds the end of its log.
        """
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        command, port = self.command(case, arm, folder), free_port()
        ranks = []
        for number in range(case.num_ranks):
            environment = rank_environment(case, number, port)
            environment |= {"BYTESCALE_RECORD": str(folder), "BYTESCALE_PLANS": arm.megatrons}
            environment |= {"BYTESCALE_MEGATRON": str(self.megatron)}
            with new_log(folder / f"rank{number}.log", is_binary=True) as log:
                ranks.append(fork(lambda: run_warm(command, environment, log.fileno(), lambda: None)))  # noqa: B023
        failed = first_failure(ranks)
        if failed is not None:
            log = (folder / f"rank{failed}.log").read_text()[-2000:]
            raise RuntimeError(f"rank {failed} ended with exit code {ranks[failed].poll()}:\n{log}")
        return read_programs(folder, case.num_ranks)


def read_programs(folder: Path, num_ranks: int) -> Programs:
    """Return the programs that a recording has written, and the losses of its log."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    programs = [read_events(folder / f"rank{rank}.events") for rank in range(num_ranks)]
    return Programs(programs, tuple(json.loads(line)["lm loss"] for line in lines))


def first_failure(ranks: Sequence[ForkedRank]) -> int | None:
    """Wait for all ranks; return the first that fails, after the others are ended, or None."""
    while True:
        codes = [rank.poll() for rank in ranks]
        failed = next((number for number, code in enumerate(codes) if code), None)
        if failed is not None:
            for rank, code in zip(ranks, codes, strict=True):
                if code is None:
                    os.kill(rank.pid, signal.SIGKILL)
                    rank.wait()
        if failed is not None or None not in codes:
            return failed
        time.sleep(0.1)


def free_port() -> int:
    """Return a port that no one listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def rank_environment(case: Case, rank: int, port: int) -> dict[str, str]:
    """Return the environment of a rank: torchrun's variables on the loopback interface."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {**torchrun_variables(rank, case.num_ranks, case.ranks_per_node), **loopback}
