"""``--moe-placement-trace``: resolved values, and refusals before anything is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.config.experts import TraceTo
from bytescale_ext.plan.experts.trace import TraceHead
from megatron.bytescale import features
from megatron.bytescale.arguments.resolve import resolve
from tests.bytescale.features.activations.test_flags import parsed

EXPERTS = {
    "num_experts": 8, "moe_router_topk": 2, "expert_model_parallel_size": 2, "moe_layer_freq": 1,
    "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": None,
}  # fmt: skip


def config_of(path: Path, **settings: Any) -> TraceTo:
    args = parsed("--moe-placement-trace", str(path), **{**EXPERTS, **settings})
    features.check(args)
    return resolve(args).get(TraceTo)


def test_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    assert config_of(path) == TraceTo(path, TraceHead(experts=8, topk=2, ranks=2))
    assert not path.exists()


def test_a_file_of_this_model_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "loads.jsonl"
    path.write_text(json.dumps({"experts": 8, "topk": 2, "ranks": 2}) + "\n")
    assert config_of(path).path == path
    for other in ({"num_experts": 4}, {"moe_router_topk": 1}, {"expert_model_parallel_size": 4}):
        with pytest.raises(ValueError, match=r"loads.jsonl is of another run: .*; choose another file"):
            config_of(path, **other)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_experts": None}, "--moe-placement-trace does not work with dense models: add --num-experts"),
        ({"mtp_num_layers": 1}, "does not work with --mtp-num-layers without --hybrid-data-parallel"),
        ({"cuda_graph_impl": "local"}, "does not work with --cuda-graph-impl"),
        ({"spec": ["a", "b"]}, "does not work with --spec"),
    ],
)
def test_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path / "loads.jsonl", **settings)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "loads.jsonl"):
        with pytest.raises(ValueError, match=r"--moe-placement-trace .* cannot be written"):
            config_of(path)
    (tmp_path / "text").write_text("no trace\n")
    with pytest.raises(ValueError, match="text:1: not a line of an expert trace"):
        config_of(tmp_path / "text")
