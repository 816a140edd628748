"""FP8 (``--fp8-format``) over documents: micro-batches have the rows that FP8 matrix products need.

TransformerEngine's products take rows in multiples of 16, with MXFP8 of 32, where Megatron's samples have them by their
length. Here the plan pads micro-batches and slices, and under sequence parallelism the part of each tensor-parallel
rank is such a multiple. Padding has no loss, and attention does not see it.

Delayed scaling reduces the largest values over all data-parallel ranks whenever a micro-batch has passed the layers.
Ranks run different numbers of micro-batches, so they would wait for each other for ever. The other recipes scale each
tensor by its own values; only tensor-parallel ranks, which share a micro-batch, reduce anything.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from bytescale_ext.config.run import RunConfig
from bytescale_ext.plan.cost.model_shape import ModelShape
from megatron.bytescale.arguments.conditions import equals, given
from megatron.bytescale.arguments.refusals import refuse
from megatron.bytescale.features.feature import Feature

if TYPE_CHECKING:
    from megatron.bytescale.runtime import Runtime
    from megatron.bytescale.training.pretrain_arguments import Training

RECIPES: Final = {
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""Recipes that do not depend on other micro-batches, and the functions of TransformerEngine that know their devices."""


@dataclass(frozen=True)
class Fp8Options:
    """Megatron's flags of FP8; checkpoints of older versions lack them.

    Attributes:
        fp8: format of numbers; None without FP8.
        fp8_recipe: how tensors are scaled.
    """

    fp8: str | None = None
    fp8_recipe: str | Enum = "delayed"

    @property
    def rows(self) -> int:
        """The multiple of rows that the matrix products of one rank take; 1 without FP8."""
        if not self.fp8:
            return 1
        from megatron.core.fp8_utils import get_fp8_align_size

        return int(get_fp8_align_size(self.fp8_recipe))

    @property
    def recipe(self) -> str:
        """The recipe's name; Megatron's checks turn it into a member of an enumeration."""
        return str(self.fp8_recipe.value if isinstance(self.fp8_recipe, Enum) else self.fp8_recipe)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the flags are Megatron's."""


def resolve(options: Fp8Options, run: RunConfig) -> str:
    """Return the recipe. Raises ValueError for a model whose matrices FP8 products do not take."""
    check_widths(run.shape, run.process.tensor_parallel, options.rows)
    return options.recipe


def check_widths(shape: ModelShape, tensor_parallel: int, multiple: int) -> None:
    """Raise ValueError unless both sides of each weight of a dense layer are multiples on each tensor-parallel rank."""
    widths = {"--hidden-size": shape.hidden, "--ffn-hidden-size": shape.ffn_hidden / tensor_parallel}
    if shape.latent is None:
        heads = shape.num_heads + 2 * shape.num_kv_heads
        widths["--kv-channels x --num-attention-heads"] = shape.num_heads * shape.head_dim / tensor_parallel
        widths["--kv-channels x (--num-attention-heads + 2 x --num-query-groups)"] = (
            heads * shape.head_dim / tensor_parallel
        )
    for name, width in widths.items():
        if width % multiple:
            raise ValueError(
                f"--fp8-format needs widths of layers in multiples of {multiple} on each tensor-parallel rank, and "
                f"{name} is {width:g} there: change it, or use bf16"
            )


def build(training: Training, runtime: Runtime) -> Training:
    """Check that TransformerEngine and the device have the recipe. Raises ValueError otherwise."""
    import transformer_engine.pytorch as engine
    from megatron.core.fp8_utils import get_fp8_recipe
    from megatron.training.utils import print_rank_0

    recipe = str(runtime.run.features["fp8"])
    check_engine(recipe, engine)
    get_fp8_recipe(training.model.transformer)  # raises ValueError for recipes that this version does not have
    print_rank_0(
        f"> bytescale: FP8 ({recipe}): micro-batches are padded to multiples of {runtime.hdp.rows_multiple} rows"
    )
    return training


class Availability(Protocol):
    """A function of ``transformer_engine.pytorch`` that tells whether the device has a recipe, and why not."""

    def __call__(self, return_reason: bool) -> tuple[bool, str]: ...


def check_engine(recipe: str, engine: object) -> None:
    """Raise ValueError if ``transformer_engine.pytorch`` says that the device does not have a recipe."""
    answer: Availability | None = getattr(engine, RECIPES[recipe], None)  # older versions do not say
    is_there, reason = (True, "") if answer is None else answer(return_reason=True)
    if not is_there:
        raise ValueError(f"--fp8-recipe {recipe} does not run here ({reason}): choose another, or use bf16")


REFUSALS = (
    refuse("--fp8-recipe delayed or custom", "fp8", "use tensorwise, blockwise or mxfp8: delayed scaling reduces over "
           "all ranks in each micro-batch, and ranks run different numbers of these",
           ~equals("fp8_recipe", *RECIPES)),
    refuse("--num-experts", "fp8", "train dense models: the tokens of each expert would need padding too"),
    refuse("--draft-heads", "fp8", "use bf16: heads are trained on states in bf16"),
    refuse("--fp8-output-proj with --chunked-cross-entropy", "fp8", "remove one of them: chunks of logits are computed "
           "in the type of the parameters", given("fp8_output_proj") & given("chunked_cross_entropy")),
)  # fmt: skip

FP8 = Feature(
    name="fp8",
    flag="--fp8-format",
    summary="FP8 matrix products of TransformerEngine: the plan pads rows",
    add_arguments=add_arguments,
    is_on=given("hybrid_data_parallel") & given("fp8"),
    options=Fp8Options,
    resolve=resolve,
    build=build,
    refusals=REFUSALS,
)
