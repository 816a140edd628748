"""Experts that begin as copies of a dense model's MLPs, which ``--moe-use-upcycling`` asks for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature
from megatron.bytescale.launch import TRACKER

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

FLAG = "--moe-use-upcycling"


@dataclass(frozen=True)
class UpcycleFrom:
    """A dense checkpoint that experts are made from.

    Attributes:
        load: folder of the dense checkpoint.
        save: folder of the new ones.
    """

    load: Path
    save: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the flag is Megatron's."""


def before_checks(args: Any) -> None:
    """Check the folders before Megatron does. Raises ValueError for one that is missing, empty or not empty."""
    if not args.load or not args.save:
        raise ValueError(f"{FLAG} needs --load, the folder of the dense checkpoint, and --save, a new folder")
    if not (Path(args.load) / TRACKER).is_file():
        raise ValueError(f"{FLAG}: --load {args.load} holds no checkpoint")
    if args.expert_model_parallel_size > 1 and any(Path(args.load).glob("*/mp_rank_*")):
        raise ValueError(
            f"{FLAG}: --load {args.load} is in the format torch, whose files are of single ranks; save it in the "
            "format torch_dist, or upcycle with --expert-model-parallel-size 1"
        )
    if (Path(args.save) / TRACKER).is_file():
        raise ValueError(
            f"{FLAG}: --save {args.save} holds checkpoints already; remove {FLAG} and give --load {args.save} to go on "
            "from the last one"
        )


def resolve(args: Any, run: RunConfig) -> UpcycleFrom:
    """Return the folders."""
    return UpcycleFrom(Path(args.load), Path(args.save))


def build(training: Training, runtime: Runtime) -> Training:
    """Copy the dense model into the experts once these are built."""
    from megatron.bytescale.features.upcycle.build import upcycle

    return upcycle(training, runtime)


def _scales_by_choices(args: Any) -> bool:
    """Return whether the router gives its experts less than 1 in all, for which Megatron makes them larger."""
    is_on = getattr(args, "moe_use_upcycling", False)
    return bool(is_on and (args.moe_router_pre_softmax or args.moe_dts_final == "top1"))


def _other_shards(args: Any) -> bool:
    return args.expert_tensor_parallel_size not in (None, args.tensor_model_parallel_size)


_LATER = "upcycle in a run of its own, and go on from its --save"
_NO_CHUNKS = "remove it: each pipeline stage is upcycled as one model chunk"
REFUSALS = (
    refuse("dense models", "upcycling", "add --num-experts", lambda a: not a.num_experts),
    refuse(FLAG, "drafts states embedding ngram", _LATER),
    refuse("--moe-router-pre-softmax with --moe-use-upcycling", "gate", "remove it (--moe-dts-final top1 sets it): "
           "Megatron scales experts for scores of top-k then, and those of the gate add up to 1", _scales_by_choices),
    refuse("--num-layers-per-virtual-pipeline-stage", "upcycling", _NO_CHUNKS),
    refuse("--num-virtual-stages-per-pipeline-rank", "upcycling", _NO_CHUNKS),
    refuse("--pipeline-model-parallel-layout", "upcycling", _NO_CHUNKS),
    refuse("--moe-layer-freq", "upcycling", "leave it at 1: Megatron upcycles all layers",
           lambda a: a.moe_layer_freq != 1),
    refuse("--expert-tensor-parallel-size", "upcycling", "give --tensor-model-parallel-size, by which the dense model "
           "is cut", _other_shards),
    refuse("--moe-shared-expert-intermediate-size", "upcycling", "remove it: shared experts would begin at random"),
    refuse("--moe-latent-size", "upcycling"),
    refuse("--quick-geglu", "upcycling", "use --swiglu, or neither: Megatron upcycles SiLU, GELU and squared ReLU"),
)  # fmt: skip

UPCYCLING = Feature(
    name="upcycling",
    flag=FLAG,
    summary="experts that begin as copies of a dense model's MLPs",
    add_arguments=add_arguments,
    is_on=lambda args: bool(getattr(args, "moe_use_upcycling", False)),
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    refusals=REFUSALS,
)
