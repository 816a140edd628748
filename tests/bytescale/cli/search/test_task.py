"""Task of the options: the model as in training, its costs, the cluster and the documents of steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.measure.cost_file import shipped, write_cost
from bytescale_ext.plan.activation.operators import LayerOperators
from megatron.bytescale import cli
from megatron.bytescale.cli.search.task import launched_words, task_of
from tests.bytescale.cli.search.test_command import LINE, MODEL, SIZES
from tests.plan.search.tasks import COST


def with_model(words: list[str], more: str) -> list[str]:
    """Return a command with further flags of the model."""
    place = words.index("--model-flags") + 1
    return [*words[:place], f"{words[place]} {more}", *words[place + 1 :]]


def test_documents_of_a_file_are_cut_at_the_context(tmp_path: Path) -> None:
    np.save(tmp_path / "lengths.npy", np.array([9000, 10, 500, 3000]))
    task = task_of(cli.parse(["search", *SIZES, "--lengths", str(tmp_path / "lengths.npy"), "--device", "h100"]))
    assert {length for step in task.steps for length in step} <= {4096, 9000 - 8192, 10, 500, 3000}
    assert task.batch == 8


def test_slower_links_between_nodes() -> None:
    task = task_of(cli.parse([*LINE, "--ranks-per-node", "2", "--slowdown", "8"]))
    assert task.cost.slowdown == 8
    assert (task.devices.count, task.devices.per_node) == (4, 2)


def test_speeds_of_nodes() -> None:
    task = task_of(cli.parse([*LINE, "--ranks-per-node", "2", "--speeds", "1x2,0.5x2"]))
    assert task.devices.speeds == (1.0, 1.0, 0.5, 0.5)
    with pytest.raises(ValueError, match="3 speeds: give 4 positive numbers, one for each device"):
        task_of(cli.parse([*LINE, "--speeds", "1x3"]))


def test_the_model_is_read_as_training_reads_it() -> None:
    task = task_of(cli.parse(with_model(LINE, "--window-size 64,0 --mtp-num-layers 1 --position-embedding-type rope")))
    shape = task.cost.shape
    assert (shape.num_window_layers, shape.window_tokens, shape.later_layers) == (1, 64, 1)
    assert task.operators == LayerOperators(angles=16, split_angles=True)
    assert (task.cost.dtype, task.rows_multiple) == ("bfloat16", 1)
    assert task_of(cli.parse(with_model(LINE, "--fp16"))).cost.dtype == "float16"


def test_published_timings_of_latents() -> None:
    latent = "--multi-latent-attention --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
    words = [*LINE, "--model-flags", f"--num-layers 2 --hidden-size 2048 --num-attention-heads 16 {latent}"]
    task = task_of(cli.parse(words))
    assert task.cost.shape.latent is not None
    assert task.cost.shape.latent.key_rank == 512
    attention = 16 * (192 + 128) / (32 * (128 + 128))  # width of all heads, relative to the measured model
    assert task.cost.forward.h > attention * shipped("h100_7b").forward.h  # each rank expands received latents


def test_a_cost_file_of_another_type_or_model_is_refused(tmp_path: Path) -> None:
    write_cost(tmp_path / "cost.json", COST)
    words = ["search", *SIZES, "--sampler", "github", "--cost-file", str(tmp_path / "cost.json")]
    assert task_of(cli.parse(words)).cost == replace(COST, shape=replace(COST.shape, num_layers=1))
    with pytest.raises(ValueError, match="dtype is bfloat16 there and float16 here"):
        task_of(cli.parse(with_model(words, "--fp16")))
    with pytest.raises(ValueError, match="ffn_hidden is 128 there and 256 here"):
        task_of(cli.parse(with_model(words, "--ffn-hidden-size 256")))


def test_the_flags_of_the_script_have_the_type_of_the_costs() -> None:
    needed = ["--attention-dropout", "0", "--hidden-dropout", "0"]
    assert launched_words(MODEL, "bfloat16") == [*MODEL.split(), *needed, "--bf16"]
    assert launched_words(f"{MODEL} --bf16", "bfloat16") == [*MODEL.split(), "--bf16", *needed]
    assert launched_words(f"{MODEL} --fp16", "bfloat16") == [*MODEL.split(), "--fp16", *needed]
    assert launched_words(MODEL, "float32") == [*MODEL.split(), *needed]
