"""No checkpoint runs code in a command or a training, unless the user gives ``--trust-checkpoint``."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import re
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from megatron.bytescale import cli
from megatron.bytescale.checkpoints import (
    LoadedCheckpoints,
    check_classes,
    check_loaded,
    flaw_of,
    names_in,
    one_line_if_damaged,
    read_metadata,
    to_load,
    trust_checkpoints,
    use_last_whole,
)
from megatron.bytescale.inference.load import check_arguments
from megatron.bytescale.launch import TRACKER
from megatron.bytescale.resumption import ExpertStates, check_expert_states
from tests.harness import run_ranks
from tests.test_pickles import Payload

STEP = "iter_0000002"


@pytest.fixture(autouse=True)
def _no_trust() -> Iterator[None]:
    yield
    trust_checkpoints(False)


def payload(folder: Path) -> Payload:
    """Return an object that makes a folder when it is unpickled."""
    return Payload(os.mkdir, str(folder / "it ran"))


def sharded(load: Path, *objects: object, **named: object) -> Path:
    """Write a checkpoint of a tensor and objects, as Megatron does; return its folder."""
    folder = load / STEP
    state: dict[str, object] = {"weight": torch.arange(1000.0), "args": Namespace(num_layers=2)}
    state |= {f"object{index}": value for index, value in enumerate(objects)} | named
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (load / TRACKER).write_text("2")
    return folder


def in_metadata(load: Path) -> None:
    folder = sharded(load)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = payload(load)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_metadata_of_a_rank(load: Path) -> None:
    folder = sharded(load)
    (folder / "__0.metadata").write_bytes(pickle.dumps(payload(load)))


def in_object(load: Path) -> None:
    sharded(load, payload(load))


def in_common(load: Path) -> None:
    folder = sharded(load)
    torch.save({"args": payload(load)}, folder / "common.pt")


def in_legacy(load: Path) -> None:
    file = load / STEP / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"args": payload(load)}, file)
    (load / TRACKER).write_text("2")


PLACES = [in_metadata, in_metadata_of_a_rank, in_object, in_common, in_legacy]
COMMANDS = {
    "generate --load": ["generate", "--prompt", "x", "--cpu", "--load"],
    "convert --load": ["convert", "--to", "hf", "--output", "unused", "--load"],
    "draft export --load": ["draft", "export", "--output", "unused", "--load"],
}


def loaded(load: Path, **others: Any) -> LoadedCheckpoints:
    given = {"pretrained_checkpoint": None, "non_persistent_global_ckpt_dir": None, "ckpt_step": None}
    return LoadedCheckpoints(load=str(load), **{"enable_msc": False, **given, **others})


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("place", PLACES)
def test_a_training_refuses_the_class_by_name(place: Callable[[Path], None], tmp_path: Path) -> None:
    place(tmp_path)
    with pytest.raises(ValueError, match=rf"^--load {tmp_path}/.* needs posix\.mkdir, and loading it could run code"):
        check_loaded(loaded(tmp_path), (0, 1), is_repaired=False)
    with pytest.raises(ValueError, match=r"^--pretrained-checkpoint .* needs posix\.mkdir"):
        check_loaded(loaded(tmp_path / "none", pretrained_checkpoint=str(tmp_path)), (0, 1), is_repaired=True)
    if place is in_metadata:
        for read in (lambda: use_last_whole(tmp_path), lambda: flaw_of(tmp_path, 2)):
            with pytest.raises(ValueError, match=r"posix\.mkdir"):
                read()
    assert not (tmp_path / "it ran").exists()
    trust_checkpoints(True)
    check_loaded(loaded(tmp_path), (0, 1), is_repaired=False)
    if place is in_metadata:
        assert names_in(tmp_path / STEP)[0]
        assert (tmp_path / "it ran").exists()


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "__0.metadata", "common.pt", "x.txt"])
def test_a_pipe_in_a_checkpoint_ends_in_one_line(name: str, tmp_path: Path) -> None:
    """A reader would wait for a writer for ever."""
    folder = sharded(tmp_path)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ValueError, match=rf"{re.escape(name)} cannot be read \(it is (no file|a pipe)\)"):
        check_classes(folder)
    (tmp_path / TRACKER).unlink()
    os.mkfifo(tmp_path / TRACKER)
    assert to_load(tmp_path) is None


def errors(rank: int, world: int, parent: Path) -> dict[str, tuple[int, str]]:
    """Return (exit code, text on standard error) of each command on the checkpoint in each folder of ``parent``."""
    found = {}
    for folder in sorted(parent.iterdir()):
        for command, words in COMMANDS.items():
            with contextlib.redirect_stderr(io.StringIO()) as text:
                code = cli.main([*words, str(folder)])
            found[f"{command} {folder}"] = code, text.getvalue()
    return found


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore")
def test_commands_refuse_the_class_by_name(tmp_path: Path) -> None:
    for place in PLACES[:4]:
        place(tmp_path / place.__name__)
    (found,) = run_ranks(errors, 1, tmp_path, init_group=False)
    assert len(found) == len(COMMANDS) * 4
    for name, (code, text) in found.items():
        assert code == 2, name
        assert text.count("\n") == 1, text
        assert "posix.mkdir, and loading it could run code" in text
        assert text.startswith(f"bytescale {name.split(' --load')[0]}: error: --load {tmp_path}")
    assert not list(tmp_path.rglob("it ran"))


def test_objects_are_divided_among_ranks(tmp_path: Path) -> None:
    sharded(tmp_path, *(Namespace(x=index) for index in range(3)), payload(tmp_path))
    outcomes = []
    for rank in range(3):
        try:
            check_classes(tmp_path / STEP, (rank, 3))
            outcomes.append("")
        except ValueError as error:
            outcomes.append(str(error))
    assert sum("posix.mkdir" in outcome for outcome in outcomes) == 1


def test_no_rank_loads_arguments_that_another_rank_checks(tmp_path: Path) -> None:
    """The states of experts are compared before ranks join a process group."""
    sharded(tmp_path, Namespace(x=1), **{"common_state/shard_0_1": [payload(tmp_path)]})
    run = ExpertStates(
        load=str(tmp_path),
        ckpt_step=None,
        finetune=False,
        no_load_optim=None,
        num_experts=4,
        expert_model_parallel_size=2,
    )
    refusals = 0
    for rank in range(3):
        try:
            check_loaded(loaded(tmp_path), (rank, 3), is_repaired=False)
        except ValueError:
            refusals += 1
            continue
        check_expert_states(run)
    assert refusals == 1
    assert not (tmp_path / "it ran").exists()


def test_remote_checkpoints_need_trust() -> None:
    remote = loaded(Path("x"), pretrained_checkpoint="msc://bucket/x", enable_msc=True)
    with pytest.raises(ValueError, match="--enable-msc: remote checkpoints cannot be checked"):
        check_loaded(remote, (0, 1), is_repaired=False)


def test_the_environment_lifts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    trust_checkpoints(False)
    file = io.BytesIO()
    torch.save([Payload(eval, "1")], file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file)


@pytest.mark.parametrize("name", ["/etc", "../other", "1_0", "+5", "\u00b2", "9" * 30, "", "\x00", "release/../x"])
def test_a_tracker_file_names_an_iteration_or_release(name: str, tmp_path: Path) -> None:
    (tmp_path / TRACKER).write_text(name)
    assert to_load(tmp_path) is None
    with pytest.raises(ValueError, match=f"^--load {tmp_path / TRACKER} names no iteration"):
        check_loaded(loaded(tmp_path), (0, 1), is_repaired=False)


def changed(**fields: object) -> Callable[[Metadata], object]:
    def change(metadata: Metadata) -> object:
        for part in metadata.storage_data.values():
            vars(part).update(fields)
        return metadata

    return change


@pytest.mark.parametrize(
    "change",
    [
        changed(relative_path="../x"),
        changed(relative_path="/etc/passwd"),
        changed(offset=-1),
        changed(length=-5),
        changed(length=1),
        changed(relative_path=5),
        lambda metadata: vars(metadata).clear() or metadata,
        lambda metadata: metadata.state_dict_metadata,
        lambda metadata: None,
        lambda metadata: vars(metadata).update(storage_data={"x": 1}) or metadata,
        lambda metadata: vars(metadata.state_dict_metadata["weight"]).update(size=torch.Size([1 << 40])) or metadata,
        lambda metadata: metadata.storage_data.pop(MetadataIndex("args")) and metadata,
        lambda metadata: vars(metadata.state_dict_metadata["weight"].chunks[0]).update(offsets=(-1,)) or metadata,
        lambda metadata: vars(metadata.state_dict_metadata["weight"].chunks[0]).update(offsets=(1,)) or metadata,
        lambda metadata: vars(metadata.state_dict_metadata["weight"].chunks[0]).update(sizes=(2000,)) or metadata,
        lambda metadata: (
            vars(metadata.state_dict_metadata["weight"].chunks[0]).update(offsets=(5,), sizes=(9,)) or metadata
        ),
    ],
)
def test_metadata_describe_what_the_files_hold(change: Callable[[Metadata], object], tmp_path: Path) -> None:
    file = sharded(tmp_path) / ".metadata"
    read_metadata(file)
    file.write_bytes(pickle.dumps(change(pickle.loads(file.read_bytes()))))
    with pytest.raises(ValueError, match=r"\.metadata cannot be read \("):
        read_metadata(file)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CheckpointException("read", {1: (KeyError("x"), traceback.StackSummary())}), "'x'"),
        (CheckpointException("read", {}), "CheckpointException"),
        (EOFError(), "EOFError"),
        (RuntimeError("two\nlines"), "two lines"),
    ],
)
def test_errors_about_damaged_tensors_are_one_line(error: BaseException, reason: str) -> None:
    """torch's CheckpointException does not derive from Exception."""
    with pytest.raises(ValueError, match=f"^x cannot be read .*{reason}"), one_line_if_damaged(Path("x")):
        raise error


@pytest.mark.slow
def test_damaged_metadata(tmp_path: Path) -> None:
    """A changed byte raises no other error than ValueError."""
    file = sharded(tmp_path) / ".metadata"
    whole = file.read_bytes()
    for place in range(0, len(whole), max(1, len(whole) // 300)):
        for byte in (0, 255, whole[place] ^ 4):
            file.write_bytes(whole[:place] + bytes([byte]) + whole[place + 1 :])
            with contextlib.suppress(ValueError):
                read_metadata(file)


@pytest.mark.parametrize(
    ("name", "value"),
    [("hidden_size", True), ("num_attention_heads", 0), ("num_layers", None), ("num_layers", "2"), ("kv_channels", -1),
     ("seq_length", 1 << 45), ("num_layers", 1000)],
)  # fmt: skip
def test_sizes_of_a_model_in_a_checkpoint(name: str, value: object) -> None:
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "padded_vocab_size": 16}
    check_arguments(Namespace(**sizes), 1000)
    with pytest.raises(ValueError, match=rf"^its (argument )?{name}"):
        check_arguments(Namespace(**{**sizes, name: value}), 1000)
