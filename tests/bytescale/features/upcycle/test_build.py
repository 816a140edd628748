"""A dense model is built and copied before the model of experts is wrapped, and Megatron loads nothing after that."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bytescale_ext.config.experts import UpcycleFrom
from megatron.bytescale.features.upcycle import build as module
from tests.config.runs import run_of


def config() -> Any:
    transformer = SimpleNamespace(num_moe_experts=8, ffn_hidden_size=48, moe_ffn_hidden_size=48)
    return SimpleNamespace(transformer=transformer, pre_wrap_hooks=[print], vocab_size=100)


def test_the_dense_model_has_one_wide_mlp() -> None:
    given = config()
    dense = module.dense_config(given, 96)
    assert (dense.transformer.num_moe_experts, dense.transformer.ffn_hidden_size) == (None, 96)
    assert dense.vocab_size == 100
    assert (given.transformer.num_moe_experts, given.transformer.ffn_hidden_size) == (8, 48)


class Model(torch.nn.Module):
    """Stands for Megatron's."""

    pg_collection, pre_process, post_process = "groups", True, False

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), value))


def test_it_is_loaded_and_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    args = SimpleNamespace(load="dense", iteration=0, moe_use_upcycling=True)
    monkeypatch.setattr("megatron.training.get_args", lambda: args)
    run = run_of().with_feature("upcycling", UpcycleFrom(Path("dense"), Path("new"), 96))
    built, read, lines = [], [], []

    class Builder:
        def __init__(self, given: Any) -> None:
            self.given = given

        def build_model(self, *where: Any) -> Model:
            built.append((self.given.transformer.ffn_hidden_size, where))
            return Model(1.0)

    def load(chunks: list[Model], optimizer: None, scheduler: None) -> None:
        read.append(args.load)
        args.iteration = 7
        chunks[0].weight.data.fill_(3.0)

    def convert(experts: list[Model], dense: list[Model]) -> dict[str, Any]:
        return {"model": {"weight": 2 * dense[0].weight.data}}

    for name, value in {
        "GPTModelBuilder": Builder, "load_checkpoint": load, "print_rank_0": lines.append,
        "upcycle_state_dict": convert,
    }.items():  # fmt: skip
        monkeypatch.setattr(module, name, value)
    training: Any = SimpleNamespace(model=config())
    assert module.upcycle(training, SimpleNamespace(run=run)) is training  # type: ignore[arg-type]
    assert (args.moe_use_upcycling, args.load) == (False, None), "Megatron neither upcycles nor loads"
    first, copying = training.model.pre_wrap_hooks
    assert first is print, "it is the last hook"
    experts = Model(0.0)
    assert copying([experts]) == [experts]
    assert built == [(96, ("groups", True, False))]
    assert read == ["dense"]
    assert experts.weight.tolist() == [6.0, 6.0]
    assert (args.load, args.iteration) == (None, 0)
    assert lines == ["> bytescale: 8 experts of each layer are copies of dense"]
