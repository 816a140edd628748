"""The search tries only trainable strategies, and reports skipped strategies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bytescale_ext.plan.search.space import Space
from bytescale_ext.plan.search.strategy import BLOCK, FULL, KEEP, PRICED, Strategy
from bytescale_ext.plan.search.task import Task
from megatron.bytescale import cli
from megatron.bytescale.cli.search import trainable
from megatron.bytescale.cli.search.task import task_of
from megatron.bytescale.cli.search.trainable import Trainable, choices_of
from tests.bytescale.cli.search.test_command import LINE
from tests.bytescale.cli.search.test_task import with_model

FP8 = "--num-layers 4 --transformer-impl transformer_engine --fp8-format hybrid --fp8-recipe tensorwise"


def task_with(more: str) -> tuple[str, Task]:
    """Return the flags of a model, and its task."""
    args = cli.parse(with_model(LINE, more))
    return args.model_flags, task_of(args)


@pytest.mark.slow
def test_everything_is_taken_of_a_plain_model() -> None:
    flags, task = task_with("--num-layers 4")
    takes = Trainable(flags, task)
    strategies = list(Space().strategies(task))
    assert {one.activations for one in strategies} == {KEEP, PRICED, FULL}
    assert all(map(takes, strategies))
    assert takes.refused() == []
    assert len(takes.reasons) < len(strategies)  # each kind is checked once
    assert takes(Strategy(1, (2, 2), 2048, activations=BLOCK, recomputed_layers=1))


@pytest.mark.slow
def test_what_training_refuses_is_not_tried() -> None:
    flags, task = task_with(FP8)
    takes = Trainable(flags, task)
    allowed = list(Space(allows=takes).strategies(task))
    assert {one.activations for one in allowed} == {KEEP, FULL}
    assert {one.num_stages for one in allowed} > {1}
    assert any(one.chooses_slices for one in allowed)
    assert sorted(reason.partition(":")[0] for reason in takes.refused()) == [
        "--activation-policy does not work with --fp8-format",
    ]


def test_a_strategy_without_memory_does_not_speak_for_its_kind() -> None:
    """Model states may leave no memory for activations on one mesh, and much on another."""
    flags, task = task_with("--num-layers 4")
    one = Strategy(1, (4,), 2048, activations=PRICED, device_gb=0.0)
    takes = Trainable(flags, task)
    assert takes(one)
    assert takes(replace(one, device_gb=0.5))


@pytest.mark.slow
def test_a_mesh_that_training_refuses_is_refused_with_all_choices() -> None:
    flags, task = task_with("--num-layers 4 --num-experts 4 --moe-router-topk 2")
    latents, narrow = task_with("--num-layers 4 --num-experts 4 --moe-router-topk 2 --moe-latent-size 16")
    assert any(map(Trainable(latents, narrow), Space().strategies(narrow)))
    takes = Trainable(f"{flags} --enable-cuda-graph", task)
    assert not any(map(takes, Space().strategies(task)))
    assert "--enable-cuda-graph" in takes.refused()[0]


def test_the_choices_of_a_strategy_has_no_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Strategy(2, (3, 2), 64, shares_optimizer=True, loss_tokens=8)
    assert choices_of(one) == choices_of(replace(one, tensor_parallel=4, stage_layers=(1, 3), tokens_per_rank=8))
    assert choices_of(one) != choices_of(replace(one, stage_layers=(2, 2)))
    assert choices_of(one) != choices_of(replace(one, loss_tokens=None))
    asked: list[list[str]] = []
    monkeypatch.setattr(trainable, "arguments_of", lambda words, *_: asked.append(words))
    flags, task = task_with("--num-layers 4")
    takes = Trainable(flags, task)
    assert [takes(replace(one, tokens_per_rank=tokens)) for tokens in (64, 128)] == [True, True]
    assert len(asked) == 2  # mesh and kind
    assert takes(replace(one, tensor_parallel=4))
    assert len(asked) == 3  # another mesh of the same kind
