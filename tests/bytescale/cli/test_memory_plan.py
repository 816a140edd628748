from __future__ import annotations

import argparse
import contextlib
import io
import json
from pathlib import Path

import pytest

from bytescale_ext.plan.memory.placement import plan_memory
from bytescale_ext.plan.memory.plan import Request
from bytescale_ext.plan.memory.step_file import ModelTraits, StepMemory
from megatron.bytescale.cli import memory_plan as command
from tests.harness import run_ranks

MODEL = "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 --swiglu --vocab-size 64"


def run_command(rank: int, world: int, words: list[str]) -> str:
    """Return the output of the command, which runs in a separate process."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert command.run(parser.parse_args(words)) == 0
    return text.getvalue()


@pytest.mark.ranks
def test_plan_of_a_recorded_step(tmp_path: Path) -> None:
    words = ["--cpu", "--model-flags", MODEL, "--seq-length", "64", "--solver-seconds", "1",
             "--swap-fraction", "0.5", "--host-memory-gb", "0.01",
             "--output", str(tmp_path / "plan.json")]  # fmt: skip
    (text,) = run_ranks(run_command, 1, words, init_group=False)
    rows = [line for line in text.splitlines() if line.startswith(("layer, ", "model, "))]
    assert [row.split("  ")[0] for row in rows] == [
        "layer, forward", "layer, backward", "model, two levels", "model, one level",
    ]  # fmt: skip
    value = json.loads((tmp_path / "plan.json").read_text())
    memory = StepMemory.from_json(value)  # loading checks the plan
    plan, record = memory.plan, memory.record
    assert (record.num_tokens, record.shape.hidden, record.dtype) == (64, 32, "float32")
    assert record.activations.swap == 0.5
    assert record.traits == ModelTraits("LayerNorm", True, True, positions="learned_absolute", learned_positions=64,
                                        tied_embeddings=True)  # fmt: skip
    assert record.device == "cpu"
    assert memory.buffer_bytes > 0
    assert set(plan.levels) == {"forward", "backward"}
    names = [request.name for request in plan.model.requests]
    for part in ("forward", "backward"):
        blocks = [name for name in names if name.startswith("layer ") and name.endswith(part)]
        assert len(blocks) >= 2  # the middle layer, and at least one like it
        assert plan.levels[part].requests
    assert plan.model.bound <= plan.model.peak <= 1.1 * plan.model.bound


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model-flags", "--num-layers 2 --hidden-size 8 --num-attention-heads 1 --position-embedding-type mrope"],
            "--position-embedding-type: use rope, yarn, learned_absolute or none",
        ),
        (["--activation-policy", "memo", "--host-memory-gb", "1"], "needs --swap-fraction here"),
        (["--swap-fraction", "0.7", "--recompute-fraction", "0.7", "--host-memory-gb", "1"], "sum to more than 1"),
    ],
)
def test_bad_input(words: list[str], message: str) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    with pytest.raises(ValueError, match=message):
        command.run(parser.parse_args(words))


def test_traits_have_megatrons_defaults() -> None:
    traits = ModelTraits("LayerNorm", True, True, positions="learned_absolute", learned_positions=96,
                         tied_embeddings=True, fused_activation=True)  # fmt: skip
    assert command.traits_of_flags("--num-layers 2 --max-position-embeddings 96", 64) == traits
    assert command.traits_of_flags(command.DEFAULT_FLAGS, 64) == ModelTraits(fused_activation=True)
    more = command.traits_of_flags("--disable-bias-linear --add-qkv-bias --qk-layernorm --no-bias-gelu-fusion", 64)
    assert (more.qkv_biases, more.qk_norms, more.fused_activation) == (True, True, False)


def test_figures_and_table_agree() -> None:
    plan = plan_memory([Request("a", 3_000_000, 0, 2), Request("b", 1_000_000, 1, 3)])
    value = command.figures({"layer, forward": (plan, 0.5)})["layer, forward"]
    assert value == {"num_requests": 2, "bound_bytes": 4_000_000, "peak_bytes": 4_000_000, "is_optimal": True,
                     "seconds": 0.5}  # fmt: skip
    assert "4.000      4.000     1.0000  optimal" in command.table_text({"layer, forward": (plan, 0.5)})
