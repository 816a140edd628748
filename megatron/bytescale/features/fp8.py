"""FP8 (``--fp8-format``) over documents, with micro-batches padded to the rows that FP8 matrix products need.

TransformerEngine's products need rows in multiples of 16, or of 32 with MXFP8. Megatron's samples meet this by their
length. Here the plan pads micro-batches and slices; under sequence parallelism each tensor-parallel rank's part is such
a multiple. Padding has no loss, and no token attends to it. Megatron pads the rows of each expert, which costs and
memory forecasts count (``Setup.expert_padding``).

Delayed scaling reduces the largest values over all data-parallel ranks after each forward pass of a micro-batch. Ranks
run different numbers of micro-batches, so they would deadlock. The other recipes scale each tensor by its own values
and reduce only over tensor-parallel ranks, which share a micro-batch.
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
"""Recipe that is independent of other micro-batches -> TransformerEngine's function that checks for device support."""


@dataclass(frozen=True)
class Fp8Options:
    """Megatron's flags of FP8; checkpoints of older versions lack them.

    Attributes:
        fp8: number format; None without FP8.
        fp8_recipe: method of scaling tensors.
        expert_tensor_parallel_size: ranks that share an expert; None or 0: as many as share a layer.
    """

    fp8: str | None = None
    fp8_recipe: str | Enum = "delayed"
    expert_tensor_parallel_size: int | None = None

    @property
    def rows(self) -> int:
        """The multiple of rows that one rank's matrix products need; 1 without FP8."""
        if not self.fp8:
            return 1
        from megatron.core.fp8_utils import get_fp8_align_size

        return int(get_fp8_align_size(self.fp8_recipe))

    @property
    def recipe(self) -> str:
        """The recipe's name; Megatron's checks convert it to an enumeration member."""
        return str(self.fp8_recipe.value if isinstance(self.fp8_recipe, Enum) else self.fp8_recipe)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add nothing: the flags are Megatron's."""


def resolve(options: Fp8Options, run: RunConfig) -> str:
    """Return the recipe. Raises ValueError for a model whose matrix sizes FP8 products do not support."""
    tensor_parallel = run.process.tensor_parallel
    check_widths(run.shape, tensor_parallel, options.rows, options.expert_tensor_parallel_size or tensor_parallel)
    return options.recipe


def check_widths(shape: ModelShape, tensor_parallel: int, multiple: int, expert_tensor_parallel: int = 1) -> None:
    """Raise ValueError unless each rank's part of every weight has sides in multiples of ``multiple``."""
    widths = {"--hidden-size": shape.hidden, "--ffn-hidden-size": shape.ffn_hidden / tensor_parallel}
    if shape.num_experts:
        width = shape.expert_width
        widths["--moe-latent-size"] = shape.expert_latent
        widths["--moe-ffn-hidden-size"] = width / expert_tensor_parallel
        widths["--moe-shared-expert-intermediate-size"] = shape.shared_ffn_hidden / tensor_parallel
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
    """Check that TransformerEngine and the device support the recipe. Raises ValueError otherwise."""
    import transformer_engine.pytorch as engine
    from megatron.core.fp8_utils import get_fp8_recipe
    from megatron.training.utils import print_rank_0

    recipe = str(runtime.run.features["fp8"])
    check_engine(recipe, engine)
    get_fp8_recipe(training.model.transformer)  # raises ValueError for recipes that this version lacks
    print_rank_0(
        f"> bytescale: FP8 ({recipe}): micro-batches are padded to multiples of {runtime.hdp.rows_multiple} rows"
    )
    return training


class Availability(Protocol):
    """A function of ``transformer_engine.pytorch`` that returns whether the device supports a recipe, and why not."""

    def __call__(self, return_reason: bool) -> tuple[bool, str]: ...


def check_engine(recipe: str, engine: object) -> None:
    """Raise ValueError if ``transformer_engine.pytorch`` reports that the device does not support a recipe."""
    answer: Availability | None = getattr(engine, RECIPES[recipe], None)  # older versions lack the function
    is_there, reason = (True, "") if answer is None else answer(return_reason=True)
    if not is_there:
        raise ValueError(f"--fp8-recipe {recipe} does not run here ({reason}): choose another, or use bf16")


REFUSALS = (
    refuse("--fp8-recipe delayed or custom", "fp8", "use tensorwise, blockwise or mxfp8: delayed scaling reduces over "
           "all ranks in each micro-batch, and ranks have different micro-batch counts",
           ~equals("fp8_recipe", *RECIPES)),
    refuse("--draft-heads", "fp8", "use bf16: heads are trained on states in bf16"),
    refuse("--fp8-output-proj with --chunked-cross-entropy", "fp8", "remove one of them: chunks of logits are computed "
           "in the dtype of the parameters", given("fp8_output_proj") & given("chunked_cross_entropy")),
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
