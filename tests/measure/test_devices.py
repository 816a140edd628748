"""Costs of known devices: without a cost file every plan uses the same ones, and no exchange is free."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.measure.cost_file import shipped
from bytescale_ext.measure.devices import DEVICES, device_cost, scaled_device_cost
from bytescale_ext.plan.cost.model_shape import LLAMA_7B
from bytescale_ext.plan.search.costs import scaled_cost
from bytescale_ext.plan.setup.costs import cost_source
from megatron.bytescale import cli
from megatron.bytescale.cli.search.task import task_of
from megatron.bytescale.cli.shared.model_flags import setup_of_model
from megatron.bytescale.cli.shared.slicing import cost_of_options

MODEL = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 11008 --swiglu --vocab-size 32000 --untie-embeddings-and-output-weights --bf16"
)
RANKS = ["--ranks", "16", "--tokens-per-rank", "8K"]


def test_plans_of_training_search_and_commands_have_the_same_costs() -> None:
    """A dry run resolves the flags of a training with the training's own function, so it is the same case."""
    setup = setup_of_model(MODEL, ["--hdp-ranks-per-node", "8", "--global-batch-size", "16"], 16)
    assert setup.cost == device_cost()
    assert not setup.measured
    assert cost_source(setup) == "shipped h100"
    words = ["--sampler", "github", "--seq-length", "64K", "--ranks", "16", "--device-memory-gb", "80"]
    assert (
        task_of(cli.parse(["search", "--model-flags", MODEL, *words, "--global-batch-size", "16"])).cost == setup.cost
    )
    assert cost_of_options(cli.parse(["plan", "--lengths", "x.npy", *RANKS])) == setup.cost
    assert (
        cost_of_options(
            cli.parse(["simulate", "--sampler", "github", "--seq-length", "64K", "--global-tokens", "1M", *RANKS])
        )
        == setup.cost
    )


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_no_exchange_is_free_in_training(tensor_parallel: int) -> None:
    mesh = [
        "--tensor-model-parallel-size",
        str(tensor_parallel),
        "--hdp-ranks-per-node",
        "8",
        "--global-batch-size",
        "16",
    ]
    setup = setup_of_model(MODEL.replace("--num-layers 32", "--num-layers 4"), mesh, 16 * tensor_parallel)
    assert cost_source(setup) == "shipped h100, scaled"
    assert setup.cost.forward.c == pytest.approx(device_cost().forward.c / tensor_parallel)
    assert setup.cost.nodes(setup.cluster) is not None, "links between nodes are slower"


def test_links_between_nodes() -> None:
    cost = device_cost("h100")
    assert cost.slowdown == pytest.approx(4096 / shipped("h100_7b").forward.c / 50e9)
    assert replace(cost, slowdown=1.0, source="") == replace(shipped("h100_7b"), source="")
    assert device_cost("bytescale").slowdown == 1.0


@pytest.mark.parametrize("name", DEVICES)
def test_costs_are_scaled_to_model_and_type(name: str) -> None:
    shape = replace(LLAMA_7B, num_layers=4, hidden=1024, num_heads=8, num_kv_heads=2, ffn_hidden=2816)
    half, single = (scaled_device_cost(shape, 2, dtype, name=name) for dtype in ("bfloat16", "float32"))
    assert half == replace(scaled_cost(device_cost(name), shape, 2), dtype="bfloat16", source=f"shipped {name}, scaled")
    assert (single.forward.c, single.backward.c) == (2 * half.forward.c, 2 * half.backward.c)
    assert (single.layer_bytes, single.forward.b) == (2 * half.layer_bytes, half.forward.b)
