"""Checkpoints that cannot be decoded are refused in one line."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.bytescale.inference.export import export_heads
from megatron.bytescale.inference.heads_folder import CONFIG, TENSORS
from megatron.bytescale.inference.load import TrunkArguments, check_cut, check_trunk
from megatron.bytescale.launch import TRACKER
from tests.e2e.drafts import ONE, heads_of, trunk
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks


def refusals(rank: int, world: int, model: Path, heads: Path, empty: Path) -> dict[str, str]:
    """Return the error of each case; ``empty`` has folders of heads, one of them without a tensor."""
    folder, shorter = empty / "folder", empty / "shorter"
    from megatron.bytescale.convert import folders as conversion
    from megatron.bytescale.inference import load

    arguments_of = load.checkpoint_arguments
    found: dict[str, str] = {}

    def case(name: str, *folders: Path | None, change: Callable[[Path, Any], None] = lambda folder, args: None) -> None:
        def changed(checkpoint: Path) -> Any:
            args = copy.copy(arguments_of(checkpoint))
            change(checkpoint.parent, args)
            return args

        load.checkpoint_arguments = conversion.checkpoint_arguments = changed
        try:
            load.open_decoder(*folders, True)  # type: ignore[arg-type, misc]
        except ValueError as error:
            found[name] = str(error)

    def wider(folder: Path, args: Any) -> None:
        args.hidden_size *= 2 if folder == heads else 1

    def claims_heads(folder: Path, args: Any) -> None:
        args.draft_heads, args.num_draft_heads, args.draft_layers, args.draft_decay = "clover", 3, 1, 0.7

    def dense_gate(folder: Path, args: Any) -> None:
        args.num_experts, args.moe_dts_steps = 4, 9

    def more_heads(folder: Path, args: Any) -> None:
        args.draft_layers = 2

    def larger(**sizes: object) -> Callable[[Path, Any], None]:
        return lambda folder, args: vars(args).update(sizes)

    case("many experts", model, None, change=larger(num_experts=1 << 30, moe_ffn_hidden_size=1 << 20))
    case("wide keys", model, None, change=larger(kv_channels=1 << 30))
    case("many layers of heads", heads, None, change=larger(draft_layers=1 << 20))
    case("no folder", empty / "none", None)
    case("empty", empty, None)
    case("legacy", empty / "legacy", None)
    case("no heads", model, model)
    case("another model", model, heads, change=wider)
    path = {"heterogeneous_layers_config_path": "/etc/passwd"}
    case("a file elsewhere", model, None, change=lambda folder, args: vars(args).update(path))
    case("a dense gate", model, None, change=dense_gate)
    with pytest.raises(ValueError, match=r".") as caught:
        conversion.to_folder(model, empty / "converted")
    found["a dense gate, converted"] = str(caught.value)
    case("heads are missing", model, None, change=claims_heads)
    case("a layer is missing", heads, None, change=more_heads)
    case("folder of another model", model, folder, change=lambda one, args: vars(args).update(vocab_size=7))
    case("folder without a tensor", model, shorter)
    os.environ["WORLD_SIZE"] = "3"
    case("three ranks", model, None)
    return found


def shorten(folder: Path, name: str) -> None:
    """Remove a tensor from a folder of heads, and from its configuration."""
    plain = load_file(folder / TENSORS)
    del plain[name]
    save_file(plain, folder / TENSORS)
    config = json.loads((folder / CONFIG).read_text())
    del config["tensors"][name]
    (folder / CONFIG).write_text(json.dumps(config))


def test_bad_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "legacy" / "iter_0000003").mkdir(parents=True)
    (tmp_path / "legacy" / TRACKER).write_text("3")
    for name in ("folder", "shorter"):
        export_heads(heads_of(1, *ONE).save, tmp_path / name)
    shorten(tmp_path / "shorter", "head_norm.weight")
    (found,) = run_ranks(refusals, 1, trunk(), heads_of(1, *ONE).save, tmp_path, init_group=False)
    expected = {
        "many experts": "parameters; its files hold ",
        "wide keys": "parameters; its files hold ",
        "many layers of heads": "parameters; its files hold ",
        "no folder": "none: there is no checkpoint",
        "empty": "there is no checkpoint",
        "legacy": "only checkpoints of --ckpt-format torch_dist can be read",
        "no heads": "this checkpoint has no draft heads",
        "another model": "heads of another model: its hidden_size is 64, not 32",
        "a file elsewhere": "models with layers of unlike shapes cannot decode here",
        **dict.fromkeys(
            ("a dense gate", "a dense gate, converted"), "ends at step 9 (--moe-dts-steps), and this is step 1"
        ),
        "heads are missing": "the tensors of its draft heads are missing",
        "a layer is missing": "tensors are missing, such as draft_heads.layer1.",
        "folder of another model": "folder: heads of another model: its vocab_size is 61, not 7",
        "folder without a tensor": "the heads have no tensor head_norm.weight",
        "three ranks": "3 processes cannot share this model: its num_attention_heads is 4",
    }
    assert found.keys() == expected.keys()
    for name, message in expected.items():
        assert message in found[name], found[name]
        assert "\n" not in found[name]


def shape_of(**changes: object) -> dict[str, object]:
    """Shapes and vocabulary of a model."""
    args = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "num_query_groups": 2,
        "group_query_attention": True, "kv_channels": 8, "padded_vocab_size": 128, "vocab_size": 61,
        "tokenizer_type": "NullTokenizer", "normalization": "RMSNorm", "position_embedding_type": "rope",
        "swiglu": True,
    }  # fmt: skip
    return TrunkArguments(**{**args, **changes}).shape()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["hidden_size", "padded_vocab_size", "vocab_size", "normalization", "swiglu"])
def test_heads_of_another_trunk(name: str) -> None:
    mine, theirs = shape_of(), shape_of(**{name: 7})
    check_trunk(Path("heads"), mine, dict(reversed(mine.items())))
    with pytest.raises(ValueError, match=rf"--draft heads: heads of another model: its {name} is 7, not "):
        check_trunk(Path("heads"), theirs, mine)
    with pytest.raises(ValueError, match=f"its {name} is None, not "):
        check_trunk(Path("heads"), {one: value for one, value in mine.items() if one != name}, mine)


@pytest.mark.parametrize(
    ("ranks", "changes", "word"),
    [
        (4, {}, "num_query_groups is 2"),
        (3, {}, "num_attention_heads is 4"),
        (2, {"ffn_hidden_size": 49}, "ffn_hidden_size is 49"),
        (2, {"padded_vocab_size": 61}, "padded_vocab_size is 61"),
    ],
)
def test_models_that_ranks_cannot_share(ranks: int, changes: dict[str, int], word: str) -> None:
    with pytest.raises(ValueError, match=f"{ranks} processes cannot share this model: its {word}"):
        check_cut(shape_of(**changes), ranks)
    check_cut(shape_of(**changes), 1)
    check_cut(shape_of(), 2)


def copied(rank: int, world: int) -> tuple[bool, list[str]]:
    """Return whether a part was copied correctly, and the refusals of a missing tensor and of another shape."""
    from megatron.bytescale.inference.load import copy_heads

    module: Any = torch.nn.Linear(3, 4)
    module.config = SimpleNamespace(gated_linear_unit=False)
    module.weight.tensor_model_parallel, module.weight.partition_dim = True, 0
    whole = {"weight": torch.arange(24.0).view(8, 3), "bias": torch.ones(4)}
    copy_heads(module, whole)
    is_right = torch.equal(module.weight, whole["weight"].chunk(2)[rank]) and torch.equal(module.bias, whole["bias"])
    errors = []
    for bad in ({"weight": whole["weight"]}, {**whole, "bias": torch.ones(5)}):
        with pytest.raises(ValueError, match="--draft: ") as caught:
            copy_heads(module, bad)
        errors.append(str(caught.value))
    return is_right, errors


def test_a_rank_copies_its_part() -> None:
    messages = ["--draft: the heads have no tensor bias", "--draft: the tensor bias has the shape (5,)"]
    assert run_ranks(copied, 2) == [(True, messages)] * 2
