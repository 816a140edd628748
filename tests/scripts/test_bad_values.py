"""Launchers refuse bad values in one line with exit code 2, before they write or submit anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.launchers import CHECKS, LOCAL, SLURM, run

# (values of variables, the message of both launchers); {in} is the checkout.
BAD_VALUES = [
    ({"SEQ_LENGTH": "32KB"}, "SEQ_LENGTH=32KB is not a whole number, such as 8 or 32K"),
    ({"BATCH": "-1"}, "BATCH=-1 is not a whole number, such as 8 or 32K"),
    ({"TOKENS_PER_RANK": "0"}, "TOKENS_PER_RANK=0: give at least 1"),
    ({"MAX_RESTARTS": "often"}, "MAX_RESTARTS=often is not a whole number, such as 8 or 32K"),
    ({"DATA": "{in}/none"}, "DATA={in}/none: there is no {in}/none.idx and .bin; bytescale corpus writes them"),
    ({"DATA": "{in}/half"}, "DATA={in}/half: there is no {in}/half.idx and .bin; bytescale corpus writes them"),
    ({"OUT": "{in}/file/out"}, "OUT={in}/file/out cannot be written; choose another folder"),
    ({"OUT": "{in}/linked"}, "{in}/linked/nccl/rank_0 is a link, whose target would be overwritten; remove it"),
    ({"LAYERS": "a[$(touch {in}/ran)]"}, "LAYERS=a[$(touch {in}/ran)] is not a whole number, such as 8 or 32K"),
]
BAD_VALUES_OF_LOCAL = [
    *BAD_VALUES,
    ({"RANKS": "0"}, "RANKS=0: give at least 1"),
    ({"RANKS": "abc"}, "RANKS=abc is not a whole number, such as 8 or 32K"),
    ({"GPUS": "-1"}, "GPUS=-1 is not a whole number, such as 8 or 32K"),
    ({"GPUS": "2", "RANKS": "4"}, "RANKS=4, but there are 2 GPUs; lower RANKS, or set GPUS=0 to train on CPU"),
    ({"GPUS": "4"}, "GPUS=4, but torch sees 2; lower GPUS, or set GPUS=0 to train on CPU"),
]
BAD_VALUES_OF_SLURM = [
    *BAD_VALUES,
    ({"GPUS_PER_NODE": "all"}, "GPUS_PER_NODE=all is not a whole number, such as 8 or 32K"),
    ({"SWEEP": "{in}/none.txt"}, "SWEEP={in}/none.txt: there is no such file"),
    ({"SBATCH_PARTITION": "none"}, "sbatch: error: no such partition; sbatch: error: not submitted"),
]


def assert_refused(script: Path, checkout: Path, message: str, **variables: str) -> None:
    """Assert that a launcher prints this line, exits with 2 and writes nothing."""
    before = sorted(checkout.rglob("*"))
    given = {name: value.replace("{in}", str(checkout)) for name, value in variables.items()}
    done = run([script], **given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"{script.name}: error: {message.replace('{in}', str(checkout))}\n"
    assert sorted(checkout.rglob("*")) == before


@pytest.mark.ranks
@pytest.mark.parametrize(("values", "message"), BAD_VALUES_OF_LOCAL, ids=str)
def test_local_refuses_bad_values(values: dict[str, str], message: str, checkout: Path) -> None:
    script = checkout / "scripts" / LOCAL.name
    assert_refused(script, checkout, message, **{"GPUS": "0", "FAKE": "exit 0", **values})


@pytest.mark.ranks
def test_local_accepts_sizes_and_other_data_but_needs_an_environment(checkout: Path) -> None:
    script = checkout / "scripts" / LOCAL.name
    assert "--seq-length 65536 " in run([script], GPUS="0", SEQ_LENGTH="64K", DRY_RUN="1").stdout
    for arguments in (["--train-data-path", "mine"], ["--hdp-loader=ray"], ["--data-args-path", "mine"]):
        assert run([script, *arguments], GPUS="0", DATA="none", FAKE="exit 0").returncode == 0
    (checkout / ".venv" / "bin" / "python").unlink()
    assert_refused(script, checkout, "there is no {in}/.venv/bin/python; run 'make setup' first", GPUS="0")


@pytest.mark.ranks
@pytest.mark.parametrize(("values", "message"), BAD_VALUES_OF_SLURM, ids=str)
def test_slurm_refuses_before_the_queue(
    values: dict[str, str], message: str, slurm_job: tuple[Path, dict[str, str]], checkout: Path
) -> None:
    _, environment = slurm_job
    (checkout / "runs" / "bytescale").mkdir(parents=True)
    outside = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
    assert_refused(checkout / "scripts" / SLURM.name, checkout, message, **outside, **values)


@pytest.mark.ranks
def test_slurm_submits_a_complete_job(slurm_job: tuple[Path, dict[str, str]], checkout: Path) -> None:
    _, environment = slurm_job
    outside = {name: value for name, value in environment.items() if not name.startswith("SLURM_")}
    script = checkout / "scripts" / SLURM.name
    assert run([script, "--lr", "1"], **outside).stdout == f"submitted {script} --lr 1\n"
    (checkout / ".venv" / "bin" / "python").unlink()
    message = "there is no repository with a .venv in {in}; run 'make setup' there, or set ROOT"
    assert_refused(script, checkout, message, **outside)


@pytest.mark.ranks
def test_links_at_logs_are_not_followed(slurm_job: tuple[Path, dict[str, str]], checkout: Path) -> None:
    script, environment = slurm_job
    target, log = checkout / "file", checkout / "out" / "slurm-1234567.log"
    log.parent.mkdir()
    log.symlink_to(target)
    done = run([script], **environment, OUT=str(log.parent))
    assert (done.returncode, target.read_text()) == (2, "")
    assert done.stderr.endswith(f"{log} is a link, whose target would be overwritten; remove it\n")
    done = run(["bash", "-c", 'source "$0" x; new_log "$1"; echo text >>"$1"', CHECKS, log])
    assert (done.returncode, target.read_text(), log.read_text()) == (0, "", "text\n")
    assert not log.is_symlink()
