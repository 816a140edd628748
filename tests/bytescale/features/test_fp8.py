"""FP8 under hybrid data parallelism: rows of a micro-batch, refusals, and a run on a GPU."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bytescale_ext.plan.cost.model_shape import LatentShape, ModelShape
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.features.fp8 import FP8, RECIPES, REFUSALS, check_engine, check_widths, resolve
from tests.bytescale.arguments.resolving import checked, refused
from tests.e2e.training import HDP, MODEL, TRAIN
from tests.harness import run_ranks

ROOT = Path(__file__).resolve().parents[3]
COMMON = [*MODEL, *TRAIN, *HDP, "--data-path", "unread"]
READY: dict[str, Any] = {
    "fp8": "hybrid", "fp8_recipe": "tensorwise", "draft_heads": None, "fp8_output_proj": False,
    "chunked_cross_entropy": None, "hybrid_data_parallel": True,
}  # fmt: skip


def refusal_of(**changes: Any) -> str:
    """Return the error line of FP8, or "" if it is accepted."""
    try:
        refuse_conflicts(argparse.Namespace(**{**READY, **changes}), {FP8.name: FP8.flag}, REFUSALS)
    except ValueError as error:
        return str(error)
    return ""


def test_only_recipes_that_no_other_rank_waits_for_are_accepted() -> None:
    assert [refusal_of(fp8_recipe=recipe) for recipe in RECIPES] == [""] * 3
    for recipe in ("delayed", "custom"):
        assert refusal_of(fp8_recipe=recipe) == (
            "--fp8-format does not work with --fp8-recipe delayed or custom: use tensorwise, blockwise or mxfp8: "
            "delayed scaling reduces over all ranks in each micro-batch, and ranks have different micro-batch counts"
        )


def test_what_would_compute_in_another_type_or_have_other_rows_is_refused() -> None:
    changes = ({"draft_heads": 2}, {"fp8_output_proj": True, "chunked_cross_entropy": 64})
    names = ["--draft-heads", "--fp8-output-proj with --chunked-cross-entropy"]
    assert [row.flag for row in REFUSALS[1:]] == names
    for one, name in zip(changes, names, strict=True):
        assert refusal_of(**one).startswith(f"--fp8-format does not work with {name}: ")
    assert refusal_of(fp8_output_proj=True) == refusal_of(chunked_cross_entropy=64) == ""


@pytest.mark.ranks
def test_without_the_engine_it_is_refused_with_the_reason() -> None:
    message = refused(4, *COMMON, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise")
    assert message.startswith("bytescale does not work with --fp8-format of local layers: use --transformer-impl")
    assert "TransformerEngine (pip install .[gpu])" in message
    assert "\n" not in message


@pytest.mark.ranks
def test_rows_are_those_of_megatrons_recipes_on_each_tensor_parallel_rank() -> None:
    (found,) = run_ranks(settings_of_recipes, 1, init_group=False)
    assert found == {
        "none": (1, 2), "tensorwise": (16, 32), "blockwise": (16, 32), "mxfp8": (32, 64),
        "no multiple": "--hdp-tokens-per-rank 120 is not a multiple of 32, as required by --sequence-parallel "
        "(--tensor-model-parallel-size) and --fp8-format (16 or 32); the next multiple is 128",
    }  # fmt: skip


def settings_of_recipes(rank: int, world: int) -> dict[str, Any]:
    """Return the rows of a rank's products and of the configuration, as on a machine with TransformerEngine."""
    from megatron.core.enums import Fp8Recipe
    from megatron.core.fp8_utils import get_fp8_align_size

    from megatron.bytescale.arguments.resolve import resolve as resolve_run
    from megatron.bytescale.arguments.setup import setup_of

    words = "--tensor-model-parallel-size 2 --sequence-parallel --hdp-tokens-per-rank 128 --hidden-size 256".split()
    words += ["--ffn-hidden-size", "512"]
    args = checked(8, [*COMMON, *words])
    run = resolve_run(args)
    found: dict[str, Any] = {"none": (FP8.read(args).rows, setup_of(args).rows_multiple)}
    args.fp8 = "hybrid"
    for recipe in RECIPES:
        args.fp8_recipe = Fp8Recipe(recipe)
        assert FP8.read(args).rows == get_fp8_align_size(Fp8Recipe(recipe))
        assert resolve(FP8.read(args), run) == recipe
        found[recipe] = (FP8.read(args).rows, setup_of(args).rows_multiple)
    args.fp8_recipe = "tensorwise"
    args.hdp_tokens_per_rank = 120
    try:
        resolve_run(args)
    except ValueError as error:
        found["no multiple"] = str(error)
    return found


@pytest.mark.parametrize(
    ("changes", "ranks", "multiple", "name"),
    [
        ({}, 2, 16, None),
        ({"hidden": 72}, 1, 16, "--hidden-size is 72"),
        ({}, 4, 32, "--ffn-hidden-size is 48"),
        ({"num_heads": 3, "head_dim": 8}, 1, 16, "--kv-channels x --num-attention-heads is 24"),
        ({"num_kv_heads": 1, "head_dim": 8}, 1, 16, None),
        ({"num_kv_heads": 1, "head_dim": 4}, 1, 16, "+ 2 x --num-query-groups) is 24"),
        ({"num_kv_heads": 1, "head_dim": 4, "latent": LatentShape(0, 16, 2, 4)}, 1, 16, None),
        ({"num_experts": 8, "experts_per_token": 3, "expert_ffn_hidden": 176, "shared_ffn_hidden": 32}, 1, 16, None),
        ({"num_experts": 8, "experts_per_token": 3, "expert_ffn_hidden": 72}, 1, 16, "--moe-ffn-hidden-size is 24"),
        (
            {"num_experts": 8, "experts_per_token": 3, "expert_ffn_hidden": 48, "expert_latent": 24},
            2,
            16,
            "--moe-latent-size is 24",
        ),
        (
            {"num_experts": 8, "experts_per_token": 2, "expert_ffn_hidden": 72, "shared_ffn_hidden": 8},
            1,
            16,
            "--moe-shared-expert-intermediate-size is 8",
        ),
    ],
)
def test_widths_that_products_do_not_take_are_refused(
    changes: dict[str, Any], ranks: int, multiple: int, name: str | None
) -> None:
    shape = replace(ModelShape(2, 64, 4, 2, 16, 192, True, 128), **changes)
    if name is None:
        check_widths(shape, ranks, multiple)
        return
    with pytest.raises(ValueError, match="--fp8-format needs widths of layers in multiples") as refusal:
        check_widths(shape, ranks, multiple)
    assert name in str(refusal.value)


def test_a_device_without_the_recipe_is_refused_with_the_engines_reason() -> None:
    """Fakes of ``transformer_engine.pytorch`` are used. Older versions do not report support."""
    answers = {"mxfp8": (False, "compute capability 10.0 is needed"), "tensorwise": (True, "")}
    engine = SimpleNamespace(
        is_mxfp8_available=lambda return_reason: answers["mxfp8"],
        is_fp8_available=lambda return_reason: answers["tensorwise"],
    )
    with pytest.raises(
        ValueError, match=r"^--fp8-recipe mxfp8 does not run here \(compute capability 10.0 is needed\)"
    ):
        check_engine("mxfp8", engine)
    check_engine("tensorwise", engine)
    check_engine("blockwise", engine)
