"""A run that has nothing left to train, or cannot use the states of its checkpoint, ends before it is built."""

from __future__ import annotations

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.bytescale import resumption
from megatron.bytescale.launch import TRACKER
from megatron.bytescale.resumption import (
    ExpertStates,
    ModelFunction,
    Resumption,
    Source,
    check_expert_states,
    check_model,
    check_source,
    check_unfinished,
)
from tests.bytescale.test_checkpoints import cut, legacy


def resumed(load: Path, **given: Any) -> Resumption:
    """Return a run that resumes from a folder, of six iterations unless samples are given."""
    names = {one.name: None for one in fields(Resumption)} | {"finetune": False, "skip_train": False}
    length = {} if "train_samples" in given else {"train_iters": 6}
    return Resumption(**{**names, "load": str(load), "seq_length": 4, **length, **given})


FINISHED: list[dict[str, Any]] = [
    {},
    {"train_iters": 5},
    {"train_samples": 48, "global_batch_size": 8},
    {"train_samples": 40, "step_batch_size_schedule": "0:4 32:8 96:12", "global_batch_size": 12},
]
UNFINISHED: list[dict[str, Any]] = [
    {"train_iters": 7},
    {"ckpt_step": 4},
    {"finetune": True},
    {"skip_train": True},
    {"train_samples": 56, "global_batch_size": 8},
    {"train_samples": 56},
    {"train_samples": 68, "step_batch_size_schedule": "0:4 32:8 96:12", "global_batch_size": 12},
]


@pytest.mark.parametrize("given", FINISHED, ids=str)
def test_a_finished_training_is_refused_when_it_is_resumed(given: dict[str, Any], tmp_path: Path) -> None:
    legacy(tmp_path, 6)
    (tmp_path / TRACKER).write_text("6")
    run = resumed(tmp_path, **given)
    flag = "--train-samples" if run.train_samples else "--train-iters"
    with pytest.raises(ValueError, match=f"nothing is left to do. Give a larger {flag} to go on.*--override-opt"):
        check_unfinished(run)


@pytest.mark.parametrize("given", UNFINISHED, ids=str)
def test_a_training_with_iterations_left_is_resumed(given: dict[str, Any], tmp_path: Path) -> None:
    for iteration in (4, 6):
        legacy(tmp_path, iteration)
    (tmp_path / TRACKER).write_text("6")
    check_unfinished(resumed(tmp_path, **given))


def test_a_newer_checkpoint_that_is_not_persistent_counts(tmp_path: Path) -> None:
    legacy(tmp_path, 4)
    legacy(tmp_path / "non_persistent", 6)
    for folder, iteration in ((tmp_path, 4), (tmp_path / "non_persistent", 6)):
        (folder / TRACKER).write_text(str(iteration))
    check_unfinished(resumed(tmp_path))
    with pytest.raises(ValueError, match="6 of 6 iterations"):
        check_unfinished(resumed(tmp_path, non_persistent_ckpt_type="global"))


def test_no_checkpoint_a_damaged_one_and_a_release_are_not_finished(tmp_path: Path) -> None:
    check_unfinished(resumed(tmp_path))
    file = legacy(tmp_path, 6)
    cut(file, 100)
    (tmp_path / TRACKER).write_text("6")
    check_unfinished(resumed(tmp_path))  # another rank chooses the checkpoint before it
    (tmp_path / "release").mkdir()
    (tmp_path / TRACKER).write_text("release")
    check_unfinished(resumed(tmp_path))


def write_sharded(load: Path, **args: Any) -> None:
    """Write the arguments of a sharded checkpoint of iteration 6."""
    folder = load / "iter_0000006"
    folder.mkdir(parents=True)
    (folder / ".metadata").touch()
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"args": argparse.Namespace(**args)}, folder / "common.pt")
    (load / TRACKER).write_text("6")


EXPERTS: dict[str, Any] = {"ckpt_step": None, "finetune": False, "no_load_optim": None, "num_experts": 4}


@pytest.mark.parametrize(("before", "now", "advice"), [(2, 1, "give 2 or more"), (1, 4, "give 1, or")])
def test_grouped_states_of_experts_are_refused(before: int, now: int, advice: str, tmp_path: Path) -> None:
    write_sharded(tmp_path, num_experts=4, expert_model_parallel_size=before)
    run = ExpertStates(load=str(tmp_path), expert_model_parallel_size=now, **EXPERTS)
    with pytest.raises(ValueError, match=f"--expert-model-parallel-size {now}: .*{advice}.*--no-load-optim"):
        check_expert_states(run)
    for given in ({"no_load_optim": True}, {"finetune": True}, {"load": None}, {"ckpt_step": 4}):
        check_expert_states(replace(run, **given))


def test_states_of_experts_on_more_ranks_and_of_a_dense_model_pass(tmp_path: Path) -> None:
    write_sharded(tmp_path / "experts", num_experts=4, expert_model_parallel_size=2)
    write_sharded(tmp_path / "dense", num_experts=None, expert_model_parallel_size=1)
    legacy(tmp_path / "legacy", 6)
    for name in ("experts", "dense", "legacy", "none"):
        check_expert_states(ExpertStates(load=str(tmp_path / name), expert_model_parallel_size=4, **EXPERTS))


def source(load: Path | None, **given: Any) -> Source:
    """Return the flags of a run that loads from a folder."""
    names = {one.name: None for one in fields(Source)} | {"finetune": False, "enable_msc": False}
    return Source(**{**names, "load": None if load is None else str(load), **given})


def test_a_run_that_names_a_checkpoint_does_not_begin_with_random_weights(tmp_path: Path) -> None:
    legacy(tmp_path, 6)
    (tmp_path / TRACKER).write_text("6")
    for right in (
        source(tmp_path), source(tmp_path, finetune=True), source(None), source(tmp_path / "new"),
        source(tmp_path / "new", pretrained_checkpoint=str(tmp_path)), source(tmp_path, pretrained_checkpoint="none"),
    ):  # fmt: skip
        check_source(right)
    for wrong, reason in {
        source(tmp_path / "iter_0000006"): f"is one checkpoint: give --load {tmp_path} --ckpt-step 6",
        source(None, finetune=True): "needs --load",
        source(None, ckpt_step=6): "--ckpt-step 6 needs --load",
        source(tmp_path / "new", finetune=True): "has none",
        source(None, pretrained_checkpoint=str(tmp_path / "new")): "has no checkpoint: correct the path",
    }.items():
        with pytest.raises(ValueError, match=reason):
            check_source(wrong)


def test_a_resumed_run_has_the_model_of_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = argparse.Namespace(
        padded_vocab_size=256, make_vocab_size_divisible_by=128, tensor_model_parallel_size=2, rotary_base=10000,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    monkeypatch.setattr(resumption, "to_load", lambda *_: tmp_path / "iter_0000006")
    monkeypatch.setattr(resumption, "_saved_arguments", lambda _: saved)
    now, run = ModelFunction(untie_embeddings_and_output_weights=True), source(tmp_path)
    assert check_model(run, now, 200, 256) is None
    assert check_model(run, now, 200, 512) is None  # the padding of more tensor-parallel ranks
    warning = check_model(run, replace(now, rotary_base=5e5, layernorm_epsilon=1e-6), 200, 256)
    assert warning is not None
    assert "--rotary-base 10000 (now 500000.0), --norm-epsilon 1e-05 (now 1e-06)" in warning
    with pytest.raises(ValueError, match="has 256 rows for the tokens of its vocabulary, and this run has 600 tokens"):
        check_model(run, now, 600, 640)
    with pytest.raises(ValueError, match="was written with --untie-embeddings-and-output-weights: add it"):
        check_model(run, replace(now, untie_embeddings_and_output_weights=False), 200, 256)
    assert check_model(replace(run, finetune=True), replace(now, rotary_base=1), 600, 640) is None
