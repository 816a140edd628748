"""Invalid launch lines end with one line that names the flag and exit code 2, before anything is built or written."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.bytescale.arguments import values
from tests.e2e.corpora import write_documents
from tests.e2e.training import HDP, MODEL, TRAIN
from tests.harness import run_ranks

pytestmark = pytest.mark.ranks

COMMON = [*MODEL, *TRAIN, *HDP, "--hdp-tokens-per-rank", "256", "--data-path", "{in}/docs"]
SECONDS_OF_A_LAUNCH = 600
MARK = "pretrain_gpt_hdp.py: error: "


def without(flag: str, num_values: int = 1) -> list[str]:
    """Return the common flags without one of them."""
    at = COMMON.index(flag)
    return [*COMMON[:at], *COMMON[at + 1 + num_values :]]


UNTOKENIZED = without("--tokenizer-type", 3)
# (launch line, words of the message); {in} is the folder of the fixture ``folder``.
CASES: list[tuple[list[str], str]] = [
    ([], "no --num-layers, --hidden-size, --num-attention-heads: give the model"),
    (without("--num-layers"), "no --num-layers: give the model"),
    *(
        ([*COMMON, f"{flag}={value}"], f"{flag} {value} must be at least 1")
        for flag, value in (
            ("--seq-length", -5), ("--num-layers", 0), ("--global-batch-size", 0), ("--max-position-embeddings", -1),
        )
    ),
    ([*COMMON, "--hdp-tokens-per-rank", "0"], "--hdp-tokens-per-rank must be positive, got 0"),
    ([*COMMON, "--hdp-tokens-per-rank", str(10**20)], "must be at most 2^40"),
    ([*COMMON, "--hdp-tokens-per-rank", "8K"], "invalid int value: '8K'"),
    ([*COMMON, "--train-iters", "0"], "--train-iters 0: nothing to train"),
    (without("--lr"), "no --lr: give the largest learning rate"),
    ([*COMMON, "--lr", "-1"], "--lr -1 must be at least 0"),
    ([*COMMON, "--min-lr", "1"], "--min-lr 1 must be at least 0 and at most --lr 0.01"),
    ([*COMMON, "--lr-warmup-init", "2"], "--lr-warmup-init 2 must be at least 0 and at most --lr 0.01"),
    ([*without("--lr-decay-iters"), "--lr-warmup-iters", "3"], "--lr-warmup-iters 3 must be less than --train-iters 3"),
    ([*COMMON, "--lr-warmup-iters", "3", "--lr-decay-iters", "3"], "--lr-warmup-iters 3 must be less than --lr-decay"),
    ([*COMMON, "--lr-decay-iters", "0"], "--lr-decay-iters 0 must be at least 1"),
    ([*COMMON, "--lr-warmup-fraction", "1"], "--lr-warmup-fraction 1 must be at least 0 and less than 1"),
    ([*COMMON, "--lr-decay-style", "WSD"], "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
    ([*COMMON, "--weight-decay", "-1"], "--weight-decay -1 must be at least 0"),
    ([*COMMON, "--weight-decay-incr-style", "linear"], "linear needs --start-weight-decay and --end-weight-decay"),
    ([*COMMON, "--end-weight-decay", "1"], "--end-weight-decay 1 needs --weight-decay-incr-style linear or cosine"),
    ([*COMMON, *"--weight-decay-incr-style linear --start-weight-decay 2 --end-weight-decay 1".split()],
     "--start-weight-decay 2 must be at least 0 and at most --end-weight-decay 1"),
    ([*COMMON, "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"], "exclude each other"),
    ([*COMMON, "--lr", "fast"], "argument --lr: invalid float value: 'fast'"),
    ([*COMMON, "--split", "a,b,c"], "--split a,b,c: give the shares of training, validation and test"),
    ([*COMMON, "--split", "nan,1,1"], "--split nan,1,1: give the shares"),
    *(([*COMMON, flag, "{in}/file"], f"{flag} {{in}}/file is a file; give a folder") for flag in values.FOLDERS),
    *(([*COMMON, flag, "{in}/file/sub"], f"{flag} {{in}}/file/sub cannot be written") for flag in values.WRITTEN),
    ([*without("--save-interval"), "--save", "{in}/new"], "--save {in}/new needs --save-interval"),
    ([*COMMON, "--hdp-timeline-step", "2"], "--hdp-timeline-step needs --hdp-log-dir"),
    ([*COMMON, "--hdp-timeline-step", "0"], "--hdp-timeline-step 0: iterations begin at 1"),
    (without("--data-path"), "no data: give --data-path PREFIX"),
    ([*COMMON, "--data-path", "{in}/none", "--save", "{in}/new", "--hdp-log-dir", "{in}/new"], "none.idx: no such"),
    (UNTOKENIZED, "no --tokenizer-type: give the tokenizer that wrote the data"),
    ([*UNTOKENIZED, "--tokenizer-type", "NullTokenizer"], "NullTokenizer needs --vocab-size"),
    ([*UNTOKENIZED, "--tokenizer-type", "Other"], "invalid choice: 'Other'"),
    *(
        ([*UNTOKENIZED, "--tokenizer-type", kind], f"{kind}: {package} is not installed; run pip")
        for kind, package in values.PACKAGES.items()
        if importlib.util.find_spec(package) is None
    ),
    ([*COMMON, "--hdp-foo"], "unrecognized arguments: --hdp-foo"),
    ([*COMMON, "--hdp-token-per-rank=3"], "--hdp-token-per-rank=3 (did you mean --hdp-tokens-per-rank?)"),
    ([*COMMON, "--cost-file", "{in}/file"], "is not JSON"),
    ([*COMMON, "--activation-policy", "auto", "--device-memory-gb", "1", "--host-memory-gb", "nan"],
     "--host-memory-gb nan is not an amount"),
    ([*COMMON, "--activation-policy", "best"], "invalid choice: 'best'"),
    ([*COMMON, "--seq1f1b-slices", "0"], "0"),
    ([*COMMON, "--seq1f1b-slices", "some"], "--seq1f1b-slices"),
    ([*COMMON, "--hdp-kept-keys", "5"], "--hdp-kept-keys needs"),
    ([*COMMON, "--chunked-cross-entropy", "0"], "--chunked-cross-entropy"),
    ([*COMMON, "--memory-plan", "{in}/none"], "{in}/none"),
    ([*COMMON, "--tensor-model-parallel-size", "3"], "start 3 processes, or lower the sizes"),
    (without("--train-iters"), "no --train-iters: give the number of steps"),
    *(
        ([*COMMON, *words.split()], message)
        for words, message in {
            "--train-samples 40": "--train-iters and --train-samples exclude each other",
            "--lr-warmup-samples 4": "--lr-warmup-samples does not count as --train-iters does: give --lr-warmup-iters",
            "--lr-warmup-fraction 0.1 --lr-warmup-iters 1": "--lr-warmup-fraction and --lr-warmup-iters exclude",
            "--log-interval 0": "--log-interval 0 must be at least 1",
            "--recompute-num-layers 0": "--recompute-num-layers 0 must be at least 1",
            "--context-parallel-size 0": "--context-parallel-size 0 must be at least 1",
            "--pipeline-model-parallel-size 0": "--pipeline-model-parallel-size 0 must be at least 1",
            "--kv-channels 7": "--kv-channels 7: rotary embeddings turn pairs",
            "--num-experts 4 --moe-router-topk 5": "--moe-router-topk 5 must be at most --num-experts 4",
            "--num-experts 3 --expert-model-parallel-size 2": "--num-experts 3 must be a multiple of --expert-model",
            "--adam-beta1 2": "--adam-beta1 2 must be at least 0 and less than 1",
            "--rotary-base 0": "--rotary-base 0 must be above 0",
            "--norm-epsilon -1": "--norm-epsilon -1 must be at least 0",
            "--bf16 --fp16": "--bf16 and --fp16 exclude each other",
            "--data-path {in}/docs.idx": "leave .idx away, give {in}/docs",
            "--finetune": "--finetune begins with the weights of a checkpoint: needs --load",
            "--finetune --load {in}/none": "--load {in}/none has none",
            "--pretrained-checkpoint {in}/none": "--pretrained-checkpoint {in}/none has no checkpoint",
        }.items()
    ),
    ([*without("--train-iters"), "--train-samples", "7"], "nothing to train; a step has --global-batch-size 8"),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("launch")
    write_documents(root / "docs", copies=1)
    (root / "file").write_text("neither a folder nor JSON")
    return root


def launch(words: Sequence[str]) -> tuple[int, str]:
    """Return the exit code and the output of a launch up to the start of training, in a child process."""
    mine, of_child = os.pipe()
    child = os.fork()
    if not child:
        code = 99
        signal.alarm(SECONDS_OF_A_LAUNCH)  # a hanging process ends with a negative exit code
        try:
            text = io.StringIO()
            with redirect_stdout(text), redirect_stderr(text):
                code = _main(words)
            os.write(of_child, text.getvalue().encode())
        finally:
            os._exit(code)
    os.close(of_child)
    with open(mine, errors="replace") as stream:
        output = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), output


def _main(words: Sequence[str]) -> int:
    import traceback

    import pretrain_gpt_hdp
    from megatron import training

    def begin(*_: object, **__: object) -> None:
        raise SystemExit(0)

    training.pretrain = begin
    sys.argv = ["pretrain_gpt_hdp.py", *words]
    try:
        pretrain_gpt_hdp.main()
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        print(traceback.format_exc())
        return 98
    return 97


def all_launches(rank: int, world: int, lines: list[list[str]]) -> list[tuple[int, str]]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return [launch(words) for words in lines[rank::world]]


def test_each_is_one_line_that_names_the_flag(folder: Path) -> None:
    launches = [[word.replace("{in}", str(folder)) for word in words] for words, _ in CASES]
    before = sorted(folder.rglob("*"))
    halves = run_ranks(all_launches, 2, launches, init_group=False)
    for number, (words, message) in enumerate(CASES):
        code, output = halves[number % 2][number // 2]
        assert code == 2, (words, output)
        assert "Traceback" not in output
        lines = [line for line in output.splitlines() if MARK in line]
        assert output.endswith("\n".join(lines) + "\n")
        parts = [part.replace("{in}", str(folder)) for part in message.split("|")]
        assert any(part in line for part in parts for line in lines), (words, lines)
    assert sorted(folder.rglob("*")) == before


def one_launch(rank: int, world: int, words: list[str]) -> tuple[int, str]:
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return launch(words)


def test_a_timeline_beyond_the_run_is_a_warning(folder: Path, tmp_path: Path) -> None:
    common = [word.replace("{in}", str(folder)) for word in COMMON]
    words = [*common, "--hdp-log-dir", str(tmp_path), "--hdp-timeline-step", "999"]
    ((code, output),) = run_ranks(one_launch, 1, words, init_group=False)
    assert code == 0
    assert "warning: --hdp-timeline-step 999 is after the last iteration, 3: nothing will be recorded\n" in output


VALUES = ["0", "-1", "1", "3", "x", "", "nan", "inf", "1e30", "8K", "/dev/null", "auto", "even", "1,2", "ray"]
SEPARATE = {"--help", "--hdp-loader", "--cpu"}  # these end the parser, start processes, or are always on


def random_launches(rank: int, world: int, folder: str) -> int:
    """Launch with random values of our flags and of flags of ``check_values``; return the number of refusals."""
    import argparse

    from megatron.bytescale.arguments.parse import add_arguments

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    actions = add_arguments(argparse.ArgumentParser(add_help=False))._actions
    takes_value = {action.option_strings[0]: action.nargs != 0 for action in actions}
    takes_value |= dict.fromkeys(
        [*values.POSITIVE, *values.RANGES, *values.FOLDERS, "--split", "--train-iters", "--tokenizer-type"], True
    )
    flags = sorted(takes_value.keys() - SEPARATE)
    refused = []

    @settings(max_examples=30, deadline=None, derandomize=True, database=None)
    @given(st.lists(st.tuples(st.sampled_from(flags), st.sampled_from(VALUES)), min_size=1, max_size=3))
    def one(given_flags: list[tuple[str, str]]) -> None:
        words = [word.replace("{in}", folder) for word in COMMON]
        words += [f"{flag}={value}" if takes_value[flag] else flag for flag, value in given_flags]
        code, output = launch(words)
        assert code in (0, 2), (given_flags, output)
        assert bool(re.findall(MARK, output)) == (code == 2), (given_flags, output)
        refused.append(code == 2)

    one()
    return sum(refused)


def test_random_flags_never_end_in_a_traceback(folder: Path) -> None:
    (num_refused,) = run_ranks(random_launches, 1, str(folder), init_group=False)
    assert num_refused > 10


@pytest.mark.parametrize(("cached", "offline"), [(None, False), ("config.json", False), (None, True)])
def test_a_hub_that_cannot_be_reached_is_said_at_once(
    cached: str | None, offline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is queried unless the tokenizer is in the cache, or transformers is set to offline mode."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # no server listens here
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        constants = SimpleNamespace(HF_HUB_OFFLINE=offline, ENDPOINT=address)
        hub = SimpleNamespace(constants=constants, try_to_load_from_cache=lambda name, file: cached)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        monkeypatch.setattr(values.urllib.request, "getproxies", dict)
        monkeypatch.setattr(values.importlib.util, "find_spec", lambda name: object())
        tokenizer = values.TokenizerChoice("HuggingFaceTokenizer", "no-such/model")
        if cached or offline:
            values.check_tokenizer(tokenizer)
        else:
            with pytest.raises(ValueError, match=r"no-such/model: no such folder, .* 127.0.0.1 cannot be reached"):
                values.check_tokenizer(tokenizer)
