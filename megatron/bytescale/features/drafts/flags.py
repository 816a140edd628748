"""Draft heads on a trained model, trained on whole long documents (Clover, Medusa)."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bytescale_ext.config.drafts import KINDS, LAYERS, DraftConfig
from bytescale_ext.config.loss_chunks import LossChunks
from bytescale_ext.config.run import RunConfig
from megatron.bytescale.arguments.conditions import IS_CUT, above, chosen, equals, given
from megatron.bytescale.arguments.options import NO_OVERRIDES, Overrides
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.checkpoints import names_in, to_load
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training


@dataclass(frozen=True, kw_only=True)
class HeadOptions:
    """Flags that describe draft heads; checkpoints of older versions lack the last two flags.

    Attributes:
        draft_heads: kind of the heads.
        num_draft_heads: number of heads.
        draft_layers: number of transformer layers below the heads.
        draft_decay: weight of a head's loss relative to the previous head's.
        draft_hidden_weight: weight of the distance between the heads' and the model's hidden states.
        draft_train_trunk: whether the model is trained too.
    """

    draft_heads: str
    num_draft_heads: int
    draft_layers: int | None
    draft_decay: float
    draft_hidden_weight: float = 0.0
    draft_train_trunk: bool = False

    def config(self) -> DraftConfig:
        """Return the configuration of the heads. Raises ValueError for bad numbers."""
        layers = LAYERS[self.draft_heads] if self.draft_layers is None else self.draft_layers
        return DraftConfig(
            self.draft_heads,
            self.num_draft_heads,
            layers,
            self.draft_decay,
            self.draft_hidden_weight,
            self.draft_train_trunk,
        )


@dataclass(frozen=True, kw_only=True)
class DraftOptions(HeadOptions):
    """Draft heads in training, and Megatron's flags of their initial checkpoints.

    Attributes:
        load: folder of the checkpoint to resume from.
        finetune: whether a new training starts with the model in ``load``.
        ckpt_step: iteration of the checkpoint; None: the last iteration.
        pretrained_checkpoint: folder of the trained model.
    """

    load: str | None
    finetune: bool
    ckpt_step: int | None
    pretrained_checkpoint: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of draft heads."""
    group = parser.add_argument_group("bytescale: draft heads")
    group.add_argument(
        "--draft-heads",
        choices=KINDS,
        help="Train heads that predict the tokens after the next token, on the model of --pretrained-checkpoint "
        "(or --load DIR --finetune). clover: each head sees the token that the previous head predicts; medusa: "
        "independent heads. `bytescale generate` decodes with them. Needs --hybrid-data-parallel.",
    )
    group.add_argument("--num-draft-heads", type=int, default=5, metavar="N", help="Number of heads (5).")
    group.add_argument(
        "--draft-layers",
        type=int,
        metavar="N",
        help="Number of transformer layers below the heads (clover: 2, medusa: 0).",
    )
    group.add_argument(
        "--draft-decay",
        type=float,
        default=0.7,
        metavar="D",
        help="Weight of a head's loss relative to the previous head's (0.7).",
    )
    group.add_argument(
        "--draft-hidden-weight",
        type=float,
        default=0.0,
        metavar="W",
        help="Weight of the distance between the heads' and the model's hidden states, added to cross entropy (0).",
    )
    group.add_argument(
        "--draft-train-trunk",
        action="store_true",
        help="Train the model too, on its own loss and the loss of the heads. By default the model is frozen.",
    )


def before_checks(options: DraftOptions) -> Overrides:
    """Return the number of layers as an override. Raises ValueError if there is no trained model."""
    if options.load is None and options.pretrained_checkpoint is None:
        raise ValueError("--draft-heads needs a trained model: give its checkpoint as --pretrained-checkpoint DIR")
    return {"draft_layers": LAYERS[options.draft_heads]} if options.draft_layers is None else NO_OVERRIDES


def resolve(options: DraftOptions, run: RunConfig) -> DraftConfig:
    """Return the configuration of the heads. Raises ValueError for bad numbers, and for resuming without heads."""
    folder = None if options.load is None or options.finetune else to_load(Path(options.load), options.ckpt_step)
    if folder is None and options.pretrained_checkpoint is not None:
        if to_load(Path(options.pretrained_checkpoint), options.ckpt_step) is None:
            raise ValueError(f"--pretrained-checkpoint {options.pretrained_checkpoint}: there is no checkpoint")
    elif folder is None and not options.finetune:
        raise ValueError(f"--load {options.load}: there is no checkpoint, and no --pretrained-checkpoint to start from")
    elif folder is not None and not any("draft_heads." in name for name in names_in(folder)):
        raise ValueError(
            f"--load {options.load}: this checkpoint has no draft heads to resume: give it as --pretrained-checkpoint"
        )
    return options.config()


def build(training: Training, runtime: Runtime) -> Training:
    """Add heads; train only the heads unless the model is trained too."""
    from megatron.bytescale.core.models.gpt.draft_loss import add_draft_heads
    from megatron.bytescale.features.drafts.build import report_drafts

    run = runtime.run
    config, chunks = run.get(DraftConfig), run.find(LossChunks)
    add = partial(add_draft_heads, config, None if chunks is None else chunks.num_tokens, runtime)
    training.model.pre_wrap_hooks.append(add)
    return training.wrap_forward_step(partial(report_drafts, config, runtime))


_FROZEN = "remove it, or train the model too: --draft-train-trunk"


REFUSALS = (
    refuse("--mtp-num-layers", "drafts", "choose one: both predict later tokens"),
    refuse("--draft-hidden-weight in slices", "drafts", "remove one: the states to compare with are in the next slice",
           IS_CUT & given("draft_hidden_weight")),
    refuse("--hdp-swapped-keys", "drafts", "remove it: keys of heads stay on the device"),
    refuse("--seq1f1b-zero-bubble", "drafts", "remove it: backward passes of heads are not split"),
    refuse("--memory-plan", "drafts", "remove it: it counts the model without heads"),
    refuse("--record-memory-plan", "drafts", "remove it: it counts the model without heads"),
    refuse("--recompute-granularity", "drafts", f"{_FROZEN}; a frozen model saves no activations",
           given("recompute_granularity") & ~given("draft_train_trunk")),
    refuse("--moe-dts-steps", "drafts", f"{_FROZEN}; a gate that starts dense would change a frozen model",
           given("moe_dts_steps") & ~given("draft_train_trunk")),
    refuse("--state-policy", "drafts", "remove it: only the heads have states", ~equals("state_policy", "resident")),
    refuse("--sculpt-windows", "drafts", "train heads on documents"),
    refuse("--num-layers-per-virtual-pipeline-stage", "drafts", "remove it: heads train without virtual stages"),
    refuse("--num-virtual-stages-per-pipeline-rank", "drafts", "remove it: heads train without virtual stages"),
    refuse("--overlap-param-gather", "drafts", "remove it: only the heads have parameters to gather"),
    refuse("--use-distributed-optimizer in pipelines", "drafts", f"{_FROZEN}; stages of a frozen model have no states",
           given("use_distributed_optimizer") & above("pipeline_model_parallel_size", 1) & ~given("draft_train_trunk")),
    refuse("--ckpt-format", "drafts", "use torch_dist, which can load a model with another layout",
           ~equals("ckpt_format", "torch_dist")),
)  # fmt: skip

DRAFTS = Feature(
    name="drafts",
    flag="--draft-heads",
    summary="draft heads on a trained model, for decoding with trees of tokens (Clover, Medusa)",
    add_arguments=add_arguments,
    is_on=chosen("draft_heads"),
    options=DraftOptions,
    resolve=resolve,
    build=build,
    before_checks=before_checks,
    requires=("hdp",),
    refusals=REFUSALS,
)
