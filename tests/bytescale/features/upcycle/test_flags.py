"""``--moe-use-upcycling``: refusals before anything is built."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.config.experts import UpcycleFrom
from megatron.bytescale import features
from megatron.bytescale.arguments.refusals import refuse_conflicts
from megatron.bytescale.arguments.resolve import resolve
from megatron.bytescale.features.upcycle.flags import REFUSALS
from megatron.bytescale.launch import TRACKER
from tests.bytescale.features.activations.test_flags import parsed
from tests.bytescale.features.gate.test_flags import FITTING, ON

UPCYCLED = {
    **FITTING, "moe_use_upcycling": True, "expert_tensor_parallel_size": 1, "moe_router_pre_softmax": False,
    "moe_upcycling_granularity": 2,
}  # fmt: skip


def config_of(folder: Path, *words: str, **settings: Any) -> UpcycleFrom:
    (folder / "dense").mkdir(exist_ok=True)
    (folder / "dense" / TRACKER).write_text("2")
    folders = {"load": str(folder / "dense"), "save": str(folder / "new")}
    args = parsed(*words, **{**UPCYCLED, **folders, **settings})
    features.check(args)
    return resolve(args).get(UpcycleFrom)


def test_folders(tmp_path: Path) -> None:
    assert config_of(tmp_path) == UpcycleFrom(tmp_path / "dense", tmp_path / "new", 2 * 4096)
    assert config_of(tmp_path, *ON).load == tmp_path / "dense", "with a gate too"


@pytest.mark.parametrize("missing", ["load", "save"])
def test_both_folders_must_be_given(missing: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--moe-use-upcycling needs --load, .* and --save, a new folder"):
        config_of(tmp_path, **{missing: None})


def test_one_must_hold_a_checkpoint_and_the_other_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--moe-use-upcycling: --load .*empty contains no checkpoint"):
        config_of(tmp_path, load=str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"--save .*dense contains checkpoints already; remove --moe-use-upcycling"):
        config_of(tmp_path, save=str(tmp_path / "dense"))


def test_files_of_ranks_fit_one_expert_rank_alone(tmp_path: Path) -> None:
    (tmp_path / "dense" / "iter_0000002" / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(ValueError, match="dense has the format torch with one file per rank; save it in"):
        config_of(tmp_path)
    assert config_of(tmp_path, expert_model_parallel_size=1, add_bias_linear=False).load == tmp_path / "dense"


# Words that enable a feature with refusals, and the settings that it refuses.
REFUSED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dense models": ((), {"num_experts": None}),
    "--moe-router-pre-softmax with --moe-use-upcycling": (ON, {"moe_router_pre_softmax": True}),
    "--num-layers-per-virtual-pipeline-stage": ((), {"num_layers_per_virtual_pipeline_stage": 1}),
    "--num-virtual-stages-per-pipeline-rank": ((), {"num_virtual_stages_per_pipeline_rank": 2}),
    "--pipeline-model-parallel-layout": ((), {"pipeline_model_parallel_layout": "Et|tL"}),
    "--moe-layer-freq": ((), {"moe_layer_freq": [0, 1]}),
    "--expert-tensor-parallel-size": ((), {"expert_tensor_parallel_size": 2}),
    "--moe-shared-expert-intermediate-size": ((), {"moe_shared_expert_intermediate_size": 64}),
    "--moe-latent-size": ((), {"moe_latent_size": 32}),
    "--quick-geglu": ((), {"quick_geglu": True}),
}


@pytest.mark.parametrize("flag", REFUSED)
def test_refused_by_name(flag: str, tmp_path: Path) -> None:
    words, settings = REFUSED[flag]
    with pytest.raises(ValueError, match=f"does not work with {flag}: "):
        config_of(tmp_path, *words, **settings)


def test_a_gate_that_ends_with_one_expert_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--moe-dts-steps does not work with --moe-router-pre-softmax with"):
        config_of(tmp_path, *ON, moe_router_pre_softmax=True)


def test_every_row_is_tested() -> None:
    first, other, *rest = REFUSALS
    assert [row.flag for row in (first, *rest)] == list(REFUSED)
    assert other.instead.keys() == {"drafts", "states", "tables"}
    with pytest.raises(ValueError, match="--draft-heads does not work with --moe-use-upcycling: upcycle"):
        refuse_conflicts(Namespace(moe_use_upcycling=True), {"drafts": "--draft-heads"}, [other])
