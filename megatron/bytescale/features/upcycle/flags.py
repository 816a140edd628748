"""Experts that are initialized as copies of a dense model's MLPs (``--moe-use-upcycling``)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.config.experts import UpcycleFrom
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import equals, given, where
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.launch import TRACKER

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

FLAG = "--moe-use-upcycling"


@dataclass(frozen=True)
class UpcycleOptions:
    """Megatron's flags of the checkpoint folders and of the ranks that share experts.

    Attributes:
        load: folder of the dense checkpoint.
        save: folder of the new checkpoints.
        expert_model_parallel_size: ranks over which experts are distributed.
        ffn_hidden_size: width of an expert.
        moe_upcycling_granularity: number of experts into which an MLP is divided.
    """

    load: str | None
    save: str | None
    expert_model_parallel_size: int
    ffn_hidden_size: int
    moe_upcycling_granularity: int

    def folders(self) -> tuple[Path, Path]:
        """Return ``load`` and ``save``. Raises ValueError if one is missing."""
        if not self.load or not self.save:
            raise ValueError(f"{FLAG} needs --load, the folder of the dense checkpoint, and --save, a new folder")
        return Path(self.load), Path(self.save)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the flag is Megatron's."""


def before_checks(options: UpcycleOptions) -> Overrides:
    """Check the folders before Megatron does.

    Raises ValueError for a missing folder, for a ``--load`` without a checkpoint, and for a ``--save`` with one.
    """
    load, save = options.folders()
    if not (load / TRACKER).is_file():
        raise ValueError(f"{FLAG}: --load {load} contains no checkpoint")
    if options.expert_model_parallel_size > 1 and any(load.glob("*/mp_rank_*")):
        raise ValueError(
            f"{FLAG}: --load {load} has the format torch with one file per rank; save it in the "
            "format torch_dist, or upcycle with --expert-model-parallel-size 1"
        )
    if (save / TRACKER).is_file():
        raise ValueError(
            f"{FLAG}: --save {save} contains checkpoints already; remove {FLAG} and give --load {save} to resume from "
            "the last checkpoint"
        )
    return NO_OVERRIDES


def resolve(options: UpcycleOptions, run: RunConfig) -> UpcycleFrom:
    """Return the folders and the width of the dense model."""
    return UpcycleFrom(*options.folders(), options.ffn_hidden_size * options.moe_upcycling_granularity)


def build(training: Training, runtime: Runtime) -> Training:
    """Copy the dense model into the experts when they are built."""
    from megatron.bytescale.features.upcycle.build import upcycle

    return upcycle(training, runtime)


@dataclass(frozen=True)
class _Shards:
    """The numbers of ranks that share each expert, and each other layer."""

    expert_tensor_parallel_size: int | None
    tensor_model_parallel_size: int

    def differ(self) -> bool:
        """Return whether experts are split differently from the dense model."""
        return self.expert_tensor_parallel_size not in (None, self.tensor_model_parallel_size)


_SCALES_BY_CHOICES = given("moe_use_upcycling") & given("moe_router_pre_softmax")
"""Whether the scores of a token's experts sum to less than 1, which makes Megatron scale the experts up."""
_LATER = "upcycle in a separate run, and continue from its --save"
_NO_CHUNKS = "remove it: each pipeline stage is upcycled as one model chunk"
REFUSALS = (
    refuse("dense models", "upcycling", "add --num-experts", ~given("num_experts")),
    refuse(FLAG, "drafts states tables", _LATER),
    refuse("--moe-router-pre-softmax with --moe-use-upcycling", "gate", "remove it: "
           "Megatron then scales experts for top-k scores, but the gate's scores sum to 1", _SCALES_BY_CHOICES),
    refuse("--num-layers-per-virtual-pipeline-stage", "upcycling", _NO_CHUNKS),
    refuse("--num-virtual-stages-per-pipeline-rank", "upcycling", _NO_CHUNKS),
    refuse("--pipeline-model-parallel-layout", "upcycling", _NO_CHUNKS),
    refuse("--moe-layer-freq", "upcycling", "leave it at 1: Megatron upcycles all layers",
           ~equals("moe_layer_freq", 1)),
    refuse("--expert-tensor-parallel-size", "upcycling", "give --tensor-model-parallel-size, which splits the dense "
           "model", where(_Shards, _Shards.differ)),
    refuse("--moe-shared-expert-intermediate-size", "upcycling", "remove it: shared experts would start at random"),
    refuse("--moe-latent-size", "upcycling", "remove it: a copy of a dense MLP reads and writes whole hidden states"),
    refuse("--quick-geglu", "upcycling", "use --swiglu, or neither: Megatron upcycles SiLU, GELU and squared ReLU"),
)  # fmt: skip

UPCYCLING = Feature(
    name="upcycling",
    flag=FLAG,
    summary="experts that start as copies of a dense model's MLPs",
    add_arguments=add_arguments,
    is_on=given("moe_use_upcycling"),
    options=UpcycleOptions,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    refusals=REFUSALS,
)
