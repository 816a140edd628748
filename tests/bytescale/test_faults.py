"""Last line of a rank that loses a peer. tests/parallel and tests/e2e/runs test the errors of real backends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from bytescale_ext.parallel.faults import PeerLost, exchange_error
from megatron.bytescale.faults import check_watchdog, named_faults
from tests.harness import run_ranks

CLOSED = "[pair.cc:553] Connection closed by peer [10.0.0.7]:58513.\nGood luck"


def unsaved(error: BaseException) -> str:
    """Return the error that a patched Megatron function raises for its own error."""

    def save_checkpoint() -> None:
        raise error

    with pytest.raises(RuntimeError) as found, named_faults():
        save_checkpoint()
    return f"{type(found.value).__name__}: {found.value}"


def last_lines(rank: int, world: int) -> dict[str, str]:
    """Return the replacement of each error, by the name of the case."""
    import megatron.training
    from torch.distributed.checkpoint.api import CheckpointException

    args: Any = SimpleNamespace(distributed_timeout_minutes=10)
    megatron.training.get_args = lambda: args
    said = {}

    def raised(error: Exception) -> str:
        with pytest.raises(type(error)) as found, named_faults():
            raise error
        return f"{type(found.value).__name__}: {found.value}"

    with pytest.raises(PeerLost) as found, named_faults():
        raise RuntimeError(CLOSED)
    said["start"] = str(found.value)
    args.curr_iteration = 11
    with pytest.raises(PeerLost) as found, named_faults():
        raise exchange_error(RuntimeError(CLOSED), [1, 3], "HDP")
    said["exchange"] = str(found.value)
    args.save = None
    with pytest.raises(SystemExit) as end:
        unsaved(TypeError("no path"))
    said["repeated fault"] = str(end.value.code)
    args.save = "/"
    said["save"] = unsaved(OSError(28, "No space left on device"))
    said["save of settings"] = unsaved(AssertionError("the states have no keys"))
    said["save of settings without a message"] = unsaved(AssertionError())
    errors: Any = {1: (RuntimeError("writing failed"), None), 2: (KeyError("optimizer"), None)}
    said["save of a rank's settings"] = unsaved(CheckpointException("save", errors))
    said["save of a rank's file"] = unsaved(CheckpointException("save", {1: errors[1]}))
    said["save of another rank"] = unsaved(RuntimeError(CLOSED))
    said["other"] = raised(RuntimeError("shapes differ"))
    said["value"] = raised(ValueError("gloo is the name of a file"))
    return said


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    return dict(run_ranks(last_lines, 1)[0])


@pytest.mark.ranks
def test_step_ranks_and_advice_are_in_one_line(said: dict[str, str]) -> None:
    closed = "[pair.cc:553] Connection closed by peer [10.0.0.7]:58513. Good luck"
    assert said["start"].startswith("rank 0, before the first step: a message in last_lines (test_faults.py) failed: [")
    assert said["exchange"].startswith(f"rank 0, step 12: the exchange with HDP ranks 1, 3 failed: {closed}. A rank")
    assert "silent for 10 minutes (--distributed-timeout-minutes)" in said["exchange"]
    assert not any("\n" in line for line in said.values())


@pytest.mark.ranks
def test_a_failed_save_names_its_folder_and_what_is_free_there(said: dict[str, str]) -> None:
    failed = "SaveFailed: rank 0, step 12: saving the checkpoint in / failed: [Errno 28] No space left on device. "
    assert said["save"].startswith(failed)
    assert "MB are free there; check the file system and start again: the run resumes from the last" in said["save"]
    assert said["save of another rank"].startswith("PeerLost: rank 0, step 12: ")


@pytest.mark.ranks
def test_a_save_that_fails_on_settings_does_not_blame_the_file_system(said: dict[str, str]) -> None:
    settings = "Megatron cannot save these settings; the file system is not the reason"
    failed = "SaveFailed: rank 0, step 12: saving the checkpoint in / failed: "
    assert said["save of settings"].startswith(f"{failed}the states have no keys. {settings}")
    assert said["save of settings without a message"].startswith(
        f"{failed}AssertionError at this check: raise error. {settings}"
    )
    assert settings in said["save of a rank's settings"]
    assert "check the file system" in said["save of a rank's file"]


@pytest.mark.ranks
def test_a_repeated_fault_without_save_ends_with_the_code_of_megatron(said: dict[str, str]) -> None:
    assert said["repeated fault"] == "16"


@pytest.mark.ranks
def test_other_errors_pass(said: dict[str, str]) -> None:
    assert said["other"] == "RuntimeError: shapes differ"
    assert said["value"] == "ValueError: gloo is the name of a file"


def test_a_watchdog_that_does_not_end_the_process_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in ("1", "3"):
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
        check_watchdog()
    for value in ("0", "2"):
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", value)
        with pytest.raises(ValueError, match=f"^TORCH_NCCL_ASYNC_ERROR_HANDLING={value}: a rank .* unset it$"):
            check_watchdog()
