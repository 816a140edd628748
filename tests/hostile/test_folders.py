"""Hostile folders: no command imports a module of the current folder, or loads what others left in a shared one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.draw.figure import new_figure
from bytescale_ext.json_input import check_stored
from megatron.bytescale import protection
from megatron.bytescale.arguments.values import Folders, ReadFiles, wrong_folders
from megatron.bytescale.checkpoints import remove_links
from megatron.bytescale.cli.search.script import ScriptedRun, script_text
from megatron.bytescale.cli.shared.lengths import read_lengths
from megatron.bytescale.launch import TRACKER
from megatron.bytescale.protection import KERNELS, protect_process

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SECONDS = 600
# Modules that Python, multiprocessing and our packages import.
MODULES = (
    "torch", "numpy", "megatron", "bytescale_ext", "pretrain_gpt_hdp", "json", "socket", "pickle", "selectors",
    "struct", "tempfile", "random", "sitecustomize", "usercustomize", "conftest", "transformers", "ray", "datatrove",
)  # fmt: skip
CLEAN = "bytescale data clean --input a=in --output out --tasks 2".split()
TRAINING = "--cpu --hybrid-data-parallel --num-layers 0".split()
MISSING = {"DATA": "no-such-data", "GPUS": "0", "RANKS": "1", "GPUS_PER_NODE": "1", "BATCH": "1"}
RECIPE = {
    **dict.fromkeys(("NODES", "GPUS_PER_NODE", "BATCH"), "1"), "SEQ_LENGTH": "8", "TOKENS_PER_RANK": "8", "VOCAB": "9",
    "MODEL_FLAGS": "--num-layers 0", "RUN_FLAGS": "", "SAMPLER": "equal", "OUT": "out",
}  # fmt: skip
RECIPES = f"{ROOT}/scripts/recipes/launch_model.sh"
# A command that starts Python, its exit code, and variables of its environment.
COMMANDS: dict[str, tuple[list[str], int, dict[str, str]]] = {
    "clean": (CLEAN, 0, {}),
    "clean on Ray": ([*CLEAN, "--executor", "ray"], 0, {}),
    "version": (["bytescale", "--version"], 0, {}),
    "corpus": (["bytescale", "corpus", "--from", "in", "--glob", "*.txt", "--output", "out/x"], 0, {}),
    "plan": (["bytescale", "plan", "--lengths", "in/lengths"], 2, {}),
    "doctor": (["bytescale", "doctor", "--cpu"], 0, {}),
    "train": (["bytescale", "train", *TRAINING], 2, {}),
    "torchrun": (["torchrun", "--nproc-per-node", "1", f"{ROOT}/pretrain_gpt_hdp.py", *TRAINING], 1, {}),
    "launch": (
        [sys.executable, "-P", "-m", "megatron.bytescale.launch", "--nproc-per-node", "1", "-m",
         "megatron.bytescale.train", *TRAINING], 2, {},
    ),
    "train_local.sh": ([f"{ROOT}/scripts/train_local.sh"], 2, MISSING),
    "a recipe's dry run": ([RECIPES, "dry-run"], 2, RECIPE),
    "a recipe's training": ([RECIPES, "torchrun"], 2, {**RECIPE, "NODES": "0"}),
    "the script of a search": (["bash", "launch.sh"], 2, {"PYTHON": sys.executable}),
    "demo": ([sys.executable, f"{ROOT}/scripts/demo.py", "--ranks", "0"], 2, {}),
}  # fmt: skip


def hostile_folder(folder: Path) -> Path:
    """Return a folder whose modules write a file when they are imported; and settings of other programs."""
    folder.mkdir()
    for name in MODULES:
        note = f"open({str(folder / 'ran')!r}, 'a').write(__name__ + '\\n')\nraise SystemExit('ran ' + __name__)\n"
        (folder / f"{name}.py").write_text(note)
    (folder / ".env").write_text("PYTHONPATH=.\n")
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\naddopts = '--no-such-option'\n")
    (folder / "matplotlibrc").write_text("text.usetex: True\n\x1b[31mred: 5\n")
    (folder / "launch.sh").write_text(script_text(ScriptedRun(TRAINING, [], 8, 8, None), 1, 8, "torchrun", []))
    (folder / "in").mkdir()
    for number in range(2):
        (folder / "in" / f"{number}.txt").write_text(f"A sentence with some words in it, number {number}.\n")
    return folder


@pytest.mark.ranks
def test_the_modules_would_run(tmp_path: Path) -> None:
    """Without the protection Python runs them: a process of multiprocessing imports from the current folder."""
    folder = hostile_folder(tmp_path / "shared")
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    subprocess.run([sys.executable, "-c", "import pickle"], cwd=folder, env=plain, capture_output=True, timeout=SECONDS)
    assert (folder / "ran").read_text() == "pickle\n"


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("name", COMMANDS)
def test_no_module_of_the_current_folder_runs(name: str, tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "shared $(id) 'x'")
    words, code, variables = COMMANDS[name]
    program = BIN / words[0]
    command = [str(program) if program.exists() else words[0], *words[1:]]
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    ended = subprocess.run(
        command, cwd=folder, env={**plain, "OMP_NUM_THREADS": "1", **variables}, capture_output=True, text=True,
        timeout=SECONDS,
    )  # fmt: skip
    assert not (folder / "ran").exists(), (folder / "ran").read_text()
    assert ended.returncode == code, ended.stderr[-2000:]
    assert "\x1b[31mred" not in ended.stdout + ended.stderr


def test_shell_scripts_start_python_safely() -> None:
    """Without ``-P``, ``-c`` and ``-m`` import from the current folder."""
    scripts = [path for end in ("sh", "sbatch") for path in (ROOT / "scripts").rglob(f"*.{end}")]
    starts = [
        (path.name, line)
        for path in scripts
        for line in path.read_text("utf-8").split("\n")
        if re.search(r"(?i)python[\w.}]*\"? +-", line) and not line.lstrip().startswith("#")
    ]
    assert len(starts) > 8
    assert [start for start in starts if not re.search(r"(?i)python[\w.}]*\"? +-P ", start[1])] == []


@pytest.mark.slow
def test_settings_of_matplotlib_in_the_current_folder_have_no_effect() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.rcParams["text.usetex"] = True
    new_figure(2, 2)
    assert not matplotlib.rcParams["text.usetex"]


def kernels(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> str | None:
    """Return the folder of kernels that a process chooses, None for torch's own choice."""
    monkeypatch.setenv(KERNELS, "unused")
    monkeypatch.delenv(KERNELS)
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(temporary))
    monkeypatch.setattr(protection.getpass, "getuser", lambda: "a/b")
    protect_process()
    assert os.environ["PYTHONSAFEPATH"] == "1"
    return os.environ.get(KERNELS)


def test_kernels_of_others_are_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, home = tmp_path / "torchinductor_a_b", str(Path.home() / ".cache" / "bytescale" / "kernels")
    assert kernels(monkeypatch, tmp_path) is None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert kernels(monkeypatch, tmp_path) is None
    folder.chmod(0o777)
    assert kernels(monkeypatch, tmp_path) == home
    folder.chmod(0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    assert kernels(monkeypatch, tmp_path) == home
    monkeypatch.undo()
    shutil.move(folder, tmp_path / "other")
    folder.symlink_to(tmp_path / "other")
    assert kernels(monkeypatch, tmp_path) == home
    monkeypatch.setenv(KERNELS, "mine")
    protect_process()
    assert os.environ[KERNELS] == "mine"


def test_torch_takes_the_folder_of_this_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("torch._inductor.runtime.cache_dir_utils")
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("getpass.getuser", lambda: "a/b:c")
    assert cache.default_cache_dir() == str(tmp_path / "torchinductor_a_b_c")


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/urandom"])
def test_devices_are_not_read(device: str) -> None:
    if not Path(device).is_char_device():
        pytest.skip("this machine has no such device")
    with pytest.raises(OSError, match="it is a device"):
        check_stored(device)
    check_stored(os.devnull)


def training_folders(**given: Any) -> Folders:
    """Return the folders of a training with only these flags."""
    others = dict.fromkeys(("save", "save_interval", "load", "tensorboard_dir", "data_cache_path"))
    return Folders(**(others | given))


def test_links_at_logs_of_tensorboard_are_refused(tmp_path: Path) -> None:
    planted = tmp_path / "events.out.tfevents.1.host.2.0"
    planted.symlink_to(tmp_path / "target")
    reasons = list(wrong_folders(training_folders(tensorboard_dir=str(tmp_path))))
    assert reasons == [f"--tensorboard-dir {planted} is a link, whose target TensorBoard could overwrite: remove it"]


@pytest.mark.parametrize(
    "link",
    [
        TRACKER, "progress.txt", "iter_0000010", "iter_0000010/common.pt", "iter_0000010/mp_rank_00/x.pt",
        "non_persistent", "non_persistent/iter_0000010",
    ],
)  # fmt: skip
def test_links_that_a_save_would_follow_are_refused(link: str, tmp_path: Path) -> None:
    """Megatron writes its files in place, so the target of a link would be emptied or filled."""
    folders = training_folders(save=str(tmp_path), save_interval=2, non_persistent_save_interval=1)
    planted = tmp_path / link
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.symlink_to(tmp_path.parent)
    assert list(wrong_folders(folders)) == [
        f"--save {planted} is a link, whose target Megatron would overwrite: remove it"
    ]
    assert [link for save in folders.paths() for link in remove_links(save, 10)] == [planted]
    assert not list(wrong_folders(folders))
    assert tmp_path.parent.is_dir()


def test_earlier_checkpoints_may_be_links(tmp_path: Path) -> None:
    """They may be stored on another disk. No save changes them."""
    (tmp_path / TRACKER).write_text("10")
    (tmp_path / "iter_0000010").symlink_to(tmp_path.parent)
    assert not list(wrong_folders(training_folders(save=str(tmp_path), save_interval=2)))


def test_pipes_and_devices_end_in_one_line(tmp_path: Path) -> None:
    """numpy would wait for the pipe, and Megatron reads its files whole."""
    pipe = tmp_path / "pipe.npy"
    os.mkfifo(pipe)
    with pytest.raises(ValueError, match="it is a pipe"):
        read_lengths(pipe)
    reasons = list(ReadFiles(data_args_path=str(pipe), tokenizer_model=str(tmp_path), vocab_file="none").wrong())
    assert reasons == [f"--data-args-path {pipe}: it is a pipe"]


@pytest.mark.parametrize("file", ["/proc/self/pagemap", "/proc/self/maps", "/proc/self/environ"])
def test_files_of_the_kernel_are_not_read(file: str, tmp_path: Path) -> None:
    if not Path(file).is_file():
        pytest.skip("this machine has no such file")
    with pytest.raises(OSError, match="no stored file"):
        check_stored(file)
    (tmp_path / "empty").touch()
    check_stored(tmp_path / "empty")
