"""Strategy to run a model on a cluster: a frozen value that converts to flags of the training and back."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

KEEP: Final = "keep"
FULL: Final = "full"
PRICED: Final = "priced"
BLOCK: Final = "block"
ACTIVATIONS: Final = (KEEP, PRICED, BLOCK, FULL)
"""Treatment of activations: keep all, ``--activation-policy priced``, full recompute of the first layers of each stage,
or full recompute of all layers."""

FULL_RECOMPUTE: Final = ("--recompute-granularity", "full", "--recompute-method", "uniform",
                         "--recompute-num-layers", "1")  # fmt: skip
BLOCK_RECOMPUTE: Final = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers")
EXPERT_EXCHANGE: Final = ("--moe-token-dispatcher-type", "alltoall", "--expert-model-parallel-size")
"""Dispatcher of tokens. Only this exchange supports different numbers of tokens on HDP ranks."""

_ACTIVATION_NAMES: Final = {PRICED: "priced activations", BLOCK: "recomputed layers", FULL: "full recompute"}
_KEPT: Final = {"none": KEEP, PRICED: PRICED}
_LAYERS: Final = re.compile(r"E?t\*(\d+)L?")


@dataclass(frozen=True, slots=True)
class Strategy:
    """Decisions of the search about a run.

    Attributes:
        tensor_parallel: number of ranks that share each layer, with sequence parallelism.
        stage_layers: number of transformer layers of each pipeline stage; one stage without pipelines.
        chunks: number of virtual stages of each stage.
        tokens_per_rank: C, the largest number of tokens of a micro-batch on one rank.
        shares_optimizer: whether HDP ranks share the optimizer states (ZeRO-1).
        chooses_slices: whether the planner chooses the slices of each step; otherwise there are no slices.
        activations: one of ``ACTIVATIONS``.
        loss_tokens: tokens of a chunk of the loss; None: all logits of a micro-batch exist together.
        device_gb: device memory in GB, if the flags need it.
        host_gb: host memory of each process for activations or keys, in GB; 0 means none.
        expert_parallel: number of HDP ranks that share the experts of each layer.
        recomputed_layers: number of first layers of each stage that are recomputed under ``BLOCK``.
    """

    tensor_parallel: int
    stage_layers: tuple[int, ...]
    tokens_per_rank: int
    chunks: int = 1
    shares_optimizer: bool = False
    chooses_slices: bool = False
    activations: str = KEEP
    loss_tokens: int | None = None
    device_gb: float | None = None
    host_gb: float = 0.0
    expert_parallel: int = 1
    recomputed_layers: int = 0

    def __post_init__(self) -> None:
        assert self.activations in ACTIVATIONS, self
        assert self.chunks == 1 or not self.chooses_slices, self
        assert (self.recomputed_layers > 0) == (self.activations == BLOCK), self

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stage_layers)

    @property
    def model_ranks(self) -> int:
        """Number of devices of one copy of the model."""
        return self.tensor_parallel * self.num_stages

    def flags(self) -> list[str]:
        """Return the flags of the training that a strategy decides, without the flags of the model."""
        words: list[object] = ["--hybrid-data-parallel", "--hdp-tokens-per-rank", self.tokens_per_rank]
        words += ["--tensor-model-parallel-size", self.tensor_parallel]
        words += ["--sequence-parallel"] if self.tensor_parallel > 1 else []
        words += ["--pipeline-model-parallel-size", self.num_stages]
        words += [*EXPERT_EXCHANGE, self.expert_parallel] if self.expert_parallel > 1 else []
        if len(set(self.stage_layers)) > 1:
            words += ["--pipeline-model-parallel-layout", layout_text(self.stage_layers)]
        words += ["--num-virtual-stages-per-pipeline-rank", self.chunks] if self.chunks > 1 else []
        words += ["--overlap-grad-reduce"]
        words += ["--use-distributed-optimizer", "--overlap-param-gather"] if self.shares_optimizer else []
        words += ["--seq1f1b-slices", "auto"] if self.chooses_slices else []
        words += FULL_RECOMPUTE if self.activations == FULL else ()
        words += [*BLOCK_RECOMPUTE, self.recomputed_layers] if self.activations == BLOCK else []
        words += ["--activation-policy", PRICED] if self.activations == PRICED else []
        words += ["--chunked-cross-entropy", self.loss_tokens] if self.loss_tokens is not None else []
        words += [] if self.device_gb is None else ["--device-memory-gb", f"{self.device_gb:.12g}"]
        words += ["--host-memory-gb", f"{self.host_gb:g}"] if self.host_gb or self.activations == PRICED else []
        return [str(word) for word in words]

    def __str__(self) -> str:
        """Return a short text of the choices, for example ``tp 2, pp 4, C 8192, slices``."""
        stages = str(self.num_stages)
        if len(set(self.stage_layers)) > 1:
            stages += f" ({'+'.join(map(str, self.stage_layers))})"
        parts = [f"tp {self.tensor_parallel}", f"pp {stages}", f"C {self.tokens_per_rank}"]
        parts += [f"ep {self.expert_parallel}"] if self.expert_parallel > 1 else []
        parts += [f"vpp {self.chunks}"] if self.chunks > 1 else []
        parts += ["slices"] if self.chooses_slices else []
        count = f"{self.recomputed_layers} " if self.activations == BLOCK else ""
        parts += [f"{count}{_ACTIVATION_NAMES[self.activations]}"] if self.activations != KEEP else []
        parts += ["chunked loss"] if self.loss_tokens is not None else []
        parts += [] if self.shares_optimizer else ["no ZeRO-1"]
        return ", ".join(parts)


def layout_text(stage_layers: Sequence[int]) -> str:
    """Return the layers of at least two stages in the format of ``--pipeline-model-parallel-layout``."""
    parts = [f"t*{layers}" for layers in stage_layers]
    return "|".join((f"E{parts[0]}", *parts[1:-1], f"{parts[-1]}L"))


def parse_strategy(flags: Sequence[str], num_layers: int) -> Strategy:
    """Return the strategy of ``Strategy.flags`` for a model of ``num_layers`` layers. Other flags are ignored.

    Raises:
        ValueError: a flag has no value or a value of another type, or ``layout_text`` does not write such a layout.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False, add_help=False)
    for flag in ("--hdp-tokens-per-rank", "--chunked-cross-entropy", "--recompute-num-layers"):
        parser.add_argument(flag, type=int)
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--expert-model-parallel-size",
                 "--num-virtual-stages-per-pipeline-rank"):  # fmt: skip
        parser.add_argument(flag, type=int, default=1)
    for flag in ("--device-memory-gb", "--host-memory-gb"):
        parser.add_argument(flag, type=float)
    for flag in ("--pipeline-model-parallel-layout", "--seq1f1b-slices", "--recompute-granularity",
                 "--recompute-method"):  # fmt: skip
        parser.add_argument(flag)
    parser.add_argument("--activation-policy", default="none")
    parser.add_argument("--use-distributed-optimizer", action="store_true")
    try:
        values, _ = parser.parse_known_args(list(flags))
    except argparse.ArgumentError as error:
        raise ValueError(str(error)) from None
    if values.hdp_tokens_per_rank is None:
        raise ValueError("the flags have no --hdp-tokens-per-rank")
    if values.activation_policy not in _KEPT:
        raise ValueError(f"--activation-policy {values.activation_policy}: strategies have none or {PRICED}")
    activations = _KEPT[values.activation_policy]
    if values.recompute_granularity == "full":
        activations = BLOCK if values.recompute_method == "block" else FULL
    return Strategy(
        tensor_parallel=values.tensor_model_parallel_size,
        stage_layers=_stage_layers(values, num_layers),
        tokens_per_rank=values.hdp_tokens_per_rank,
        chunks=values.num_virtual_stages_per_pipeline_rank,
        shares_optimizer=values.use_distributed_optimizer,
        chooses_slices=values.seq1f1b_slices == "auto",
        activations=activations,
        loss_tokens=values.chunked_cross_entropy,
        device_gb=values.device_memory_gb,
        host_gb=values.host_memory_gb or 0.0,
        expert_parallel=values.expert_model_parallel_size,
        recomputed_layers=values.recompute_num_layers if activations == BLOCK else 0,
    )


def _stage_layers(found: argparse.Namespace, num_layers: int) -> tuple[int, ...]:
    num_stages, layout = int(found.pipeline_model_parallel_size), found.pipeline_model_parallel_layout
    if layout is None:
        return (num_layers // num_stages,) * num_stages
    parts = [_LAYERS.fullmatch(part) for part in str(layout).split("|")]
    layers = tuple(int(part.group(1)) for part in parts if part is not None)
    if len(layers) != num_stages or sum(layers) != num_layers or layout != layout_text(layers):
        raise ValueError(f"--pipeline-model-parallel-layout {layout} does not lay {num_layers} layers on {num_stages}")
    return layers
