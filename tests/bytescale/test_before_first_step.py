"""Errors and exits of Megatron before the first step, in one line that names the flag that helps."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from bytescale_ext.parallel.faults import PeerLost
from megatron.bytescale.arguments.bad_input import Reasons, Refused, one_line_errors
from megatron.bytescale.before_first_step import EXITS, line_of
from megatron.bytescale.faults import explain_in_one_line

LOAD = "/runs/a"


def checkpointing() -> Path:
    """Return Megatron's file about checkpoints, without importing it."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1] / "training" / "checkpointing.py"


def raised(
    statement: str, file: Path | str, line: int = 1, function: str = "load", names: dict[str, object] | None = None
) -> BaseException:
    """Return the error that a statement at a line of a file raises in a function of this name."""
    body = f"def {function}(): {statement}"
    scope: dict[str, object] = dict(names or {})
    exec(compile("\n" * (line - 1) + body, str(file), "exec"), scope)
    try:
        scope[function]()  # type: ignore[operator]
    except BaseException as error:
        return error
    raise AssertionError(statement)


def exits() -> list[int]:
    """Return the lines of Megatron's file that end the process without a code."""
    calls = [node for node in ast.walk(ast.parse(checkpointing().read_text())) if isinstance(node, ast.Call)]
    return [node.lineno for node in calls if ast.unparse(node) in ("sys.exit()", "exit()")]


def test_every_exit_of_megatron_without_a_code_is_an_error() -> None:
    lines = [line_of(raised("raise SystemExit", checkpointing(), line), LOAD) for line in exits()]
    assert len(lines) == 7
    assert None not in lines
    known = {reason.line.format(load=LOAD) for reason in EXITS}
    assert len(known & set(lines)) == 5
    assert all("Megatron ended without training" in str(line) for line in set(lines) - known)


def test_an_exit_that_has_a_code_or_did_its_work_passes() -> None:
    assert line_of(raised("raise SystemExit(16)", checkpointing()), LOAD) is None
    assert line_of(raised("raise SystemExit", "/lib/megatron/training/training.py"), LOAD) is None


def test_a_schedule_that_differs_names_both_flags() -> None:
    text = "OptimizerParamScheduler: class input value 48 and checkpointvalue 24 for total number of steps do not match"
    line = line_of(raised(f"assert False, '{text}'", "/lib/megatron/core/optimizer_param_scheduler.py"), LOAD)
    assert line is not None
    assert "the checkpoint /runs/a has total number of steps 24, these flags 48: give --override-opt-param" in line
    assert "--use-checkpoint-opt-param-scheduler" in line


MISSING = "has no decoder.table: give the flags of the model that wrote it"
LOADING = {  # texts that Megatron and torch raise while they load a checkpoint, shortened
    "num_layers value from checkpoint (2) is not equal to the input argument value (3).": "--num-layers 2, and these",
    "Global shape mismatch for loaded (torch.Size([2, 8])) and expected ((2, 9)) tensor for key a.w": "a.w with",
    "Error(s): size mismatch for a.w: copying a param with shape torch.Size([2]) from checkpoint, the shape in current "
    "model is torch.Size([3]).": "a.w with the shape [2], and these flags give [3]",
    "CheckpointException ranks:dict_keys([0])\nTraceback\nKeyError: 'decoder.table'": MISSING,
    'CheckpointException ranks:dict_keys([0])\nTraceback\nKeyError: "decoder.table from model not in state dict: [': (
        MISSING
    ),
    "Missing key in checkpoint state_dict: optimizer.state.step.": "or --no-load-optim",
    "Could not find parameter group with key (None)": "--use-distributed-optimizer",
    "Detected load from a distributed checkpoint, but": "give --ckpt-format torch_dist",
    "CheckpointingConfig.__init__() missing 1 required": "metadata.json",
    "[Errno 2] No such file or directory: '/runs/a/release'": "/runs/a/release is missing",
}


@pytest.mark.parametrize("text", LOADING)
def test_checkpoints_that_do_not_fit_name_what_helps(text: str) -> None:
    error = raised(f"raise RuntimeError({text!r})", "/lib/megatron/core/load.py", function="load_checkpoint")
    line = line_of(error, LOAD)
    assert line is not None
    assert LOADING[text] in line
    assert LOAD in line
    assert "--traceback" not in line


def test_other_errors_of_megatron_keep_their_message_and_place() -> None:
    file = "/lib/megatron/core/transformer/block.py"
    assert line_of(raised("raise ValueError('no  such\\nblock')", file, 7), None) == (
        "Megatron refuses these settings: no such block (block.py:7; --traceback prints the calls)"
    )
    error = raised("raise RuntimeError('size mismatch for weight')", file, function="load_checkpoint")
    line = line_of(error, LOAD)
    assert line is not None
    assert line.startswith("the checkpoint /runs/a does not fit these flags: size mismatch for weight")


@pytest.mark.parametrize(
    ("statement", "file"),
    [
        ("raise RuntimeError('CUDA error')", "/lib/megatron/core/block.py"),
        ("raise OSError('the disk is gone')", "/lib/megatron/core/block.py"),
        ("assert 1 == 2", "/here/bytescale_ext/plan/step/check.py"),
    ],
)
def test_failures_of_the_machine_and_our_own_bugs_pass(statement: str, file: str) -> None:
    assert line_of(raised(statement, file), LOAD) is None


def test_our_own_value_errors_are_the_line() -> None:
    assert line_of(raised("raise ValueError('--a: b')", "/here/bytescale_ext/plan/x.py"), LOAD) == "--a: b"


def test_all_reasons_are_named_and_torchrun_gets_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    monkeypatch.setattr(sys, "argv", ["x"])
    reasons = Reasons()
    with reasons.collect():
        raise ValueError("--a: one")
    with reasons.collect():
        raise Refused("--b: two", "--a: one")
    with reasons.collect():
        raise TypeError("a consequence")
    with pytest.raises(SystemExit) as end, one_line_errors("program"):
        reasons.refuse()
    assert end.value.code == 2
    assert capsys.readouterr().err == "program: error: --a: one\nprogram: error: --b: two\n"
    failure = ProcessFailure(0, 9, 2, str(tmp_path / "error.json"))
    assert "traceback : --a: one; --b: two\n" in str(ChildFailedError("program", {0: failure}))


def test_a_traceback_on_request(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--traceback"])
    with pytest.raises(SystemExit), one_line_errors("program"):
        raise ValueError("--a: one")
    assert capsys.readouterr().err.startswith("Traceback")


def test_an_error_without_a_reason_is_no_refusal() -> None:
    with pytest.raises(TypeError), Reasons().collect():
        raise TypeError("a bug")


def test_explained_errors_end_in_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["x"])
    error = raised("raise PeerLost('rank 0, step 3: gone')", "/here/ring.py", names={"PeerLost": PeerLost})
    explain_in_one_line(type(error), error, error.__traceback__)
    assert capsys.readouterr().err == "PeerLost: rank 0, step 3: gone\n"
    error = raised("raise RuntimeError('a bug')", "/here/ring.py")
    explain_in_one_line(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.startswith("Traceback")
