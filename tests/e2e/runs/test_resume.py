"""A resumed run equals an uninterrupted run: same documents in the same order, and same losses."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import pytest

from bytescale_ext.measure.timeline import read_phases
from megatron.bytescale.launch import TRACKER
from megatron.bytescale.training import training
from tests.e2e.training import (
    HDP,
    MODEL,
    TRAIN,
    Outcome,
    documents_in_order,
    print_step,
    record_steps,
    step_losses,
    train_ranks,
    train_with,
)
from tests.sample import sampled

pytestmark = pytest.mark.ranks

TORCH_DIST = ["--ckpt-format", "torch_dist"]
EVALUATE = "--split 60,20,20 --eval-interval 2 --eval-iters 1".split()
TOKENS_PER_RANK = {4: 64, 2: 128}  # the longest document needs all ranks in both layouts


def run(corpus: Path, log_dir: Path, num_ranks: int, *flags: object, entry: Any = record_steps) -> list[Outcome]:
    return train_ranks(num_ranks, *MODEL, *TRAIN, "--data-path", corpus, *HDP, "--hdp-tokens-per-rank",
                       TOKENS_PER_RANK[num_ranks], "--use-distributed-optimizer", "--train-iters", 6, "--hdp-log-dir",
                       log_dir, *flags,
                       entry=entry)  # fmt: skip


@pytest.fixture(scope="module")
def whole_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[str]], list[float]]:
    """Return documents and losses of an uninterrupted run of six steps on four ranks."""
    log_dir = tmp_path_factory.mktemp("whole")
    outcomes = run(corpus, log_dir, 4)
    return documents_in_order(outcomes), step_losses(log_dir)


def consumed_samples(outcome: Outcome) -> list[int]:
    lines = [line for line in outcome.text.splitlines() if "consumed samples:" in line]
    return [int(line.split("consumed samples:")[1].split("|")[0]) for line in lines]


@pytest.mark.parametrize(("first", "then"), sampled([(4, (4, 2)), (2, (4,))], [(2, (4,))]))
def test_resumed_on_as_many_or_other_ranks(
    first: int, then: tuple[int, ...], corpus: Path, whole_run: tuple[list[list[str]], list[float]], tmp_path: Path
) -> None:
    """The timeline shows the requested step."""
    documents, losses = whole_run
    save = tmp_path / "save"
    planted = partial(with_planted_links, save, tmp_path / "target")
    begun = run(corpus, tmp_path, first, *TORCH_DIST, "--save", save, "--exit-interval", 3, entry=planted)
    assert begun[0].code == 0
    assert begun[0].text.count("a link that Megatron's save would have followed") == 3
    assert not list((tmp_path / "target").iterdir())
    assert "exiting program at iteration 3" in begun[0].text
    assert documents_in_order(begun) == documents[:3]
    assert consumed_samples(begun[-1]) == [8, 16, 24]
    for num_ranks in then:
        folder = tmp_path / str(num_ranks)
        resumed = run(corpus, folder, num_ranks, *TORCH_DIST, "--load", save, "--hdp-timeline-step", 5)
        assert documents_in_order(resumed) == documents[3:]
        assert [record["iteration"] for record in resumed[0].records()] == [4, 5, 6]
        assert consumed_samples(resumed[-1]) == [32, 40, 48]
        assert {phase.step for phase in read_phases(folder / "timeline")} == {5}
        found = step_losses(tmp_path) + step_losses(folder)
        assert found == pytest.approx(losses, rel=1e-5)
        assert found == losses or not first == num_ranks == 4  # to the last bit


@pytest.mark.full
def test_steps_of_tokens_go_on_after_the_documents_before_them(
    corpus: Path, whole_run: tuple[list[list[str]], list[float]], tmp_path: Path
) -> None:
    """Each step has the next documents up to 700 tokens, and the checkpoint counts these documents."""
    tokens, save = ["--hdp-global-tokens", 700], tmp_path / "save"
    begun = run(corpus, tmp_path, 2, *tokens, "--save", save, "--exit-interval", 3)
    resumed = run(corpus, tmp_path, 2, *tokens, "--load", save)
    steps = documents_in_order(begun) + documents_in_order(resumed)
    read, in_order = list(chain(*steps)), list(chain(*whole_run[0]))
    assert len(steps) == 6
    assert read[: len(in_order)] == in_order[: len(read)]
    sizes = [[stop - start for start, stop in map(token_range, step)] for step in steps]
    for step, after in pairwise(sizes):
        assert sum(step) <= 700 < sum(step) + after[0]
    assert consumed_samples(begun[-1]) + consumed_samples(resumed[-1]) == list(accumulate(map(len, steps)))


@pytest.mark.full
def test_steps_that_grow_follow_megatrons_count(
    corpus: Path, whole_run: tuple[list[list[str]], list[float]], tmp_path: Path
) -> None:
    ramp = "--rampup-batch-size 4 4 16 --global-batch-size 12 --train-samples 40".split()
    flags = [*MODEL, *TRAIN[TRAIN.index("--clip-grad") :], "--lr", 1e-2, "--data-path", corpus, *HDP, *ramp]
    outcomes = train_ranks(4, *flags, entry=record_steps)
    steps = documents_in_order(outcomes)
    assert [len(step) for step in steps] == [4, 4, 8, 12, 12]
    assert list(chain(*steps)) == list(chain(*whole_run[0]))[:40]
    assert consumed_samples(outcomes[-1]) == [4, 8, 16, 28, 40]


def with_planted_links(save: Path, target: Path) -> None:
    """Plant links before the last moment at which a run looks for them, and record its steps."""
    look = training.remove_links

    def plant_and_look(folder: Path, iteration: int) -> list[Path]:
        if iteration == 3:
            target.mkdir()
            for name in (TRACKER, "progress.txt", "iter_0000003"):
                (save / name).symlink_to(target / name if "." in name else target)
        return look(folder, iteration)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "remove_links", plant_and_look)
        record_steps()


def token_range(document: str) -> tuple[int, int]:
    """Return the position of a document's first token in a record, and the position after its last token."""
    start, stop = document.rpartition(" ")[2].split("-")
    return int(start), int(stop)


@pytest.mark.full
def test_resumed_evaluation_goes_on_in_its_own_order(corpus: Path, tmp_path: Path) -> None:
    whole = run(corpus, tmp_path / "whole", 2, *EVALUATE)
    save = tmp_path / "save"
    begun = run(corpus, tmp_path / "parts", 2, *EVALUATE, "--save", save, "--exit-interval", 3)
    resumed = run(corpus, tmp_path / "parts", 2, *EVALUATE, "--load", save)
    parts = documents_in_order(begun, training=False) + documents_in_order(resumed, training=False)
    assert parts == documents_in_order(whole, training=False)
    assert len(parts) == 5  # after 2, 4 and 6 iterations, at the end, and on the test set
    assert step_losses(tmp_path / "parts") == step_losses(tmp_path / "whole")
    validation = begun[-1].validation_losses + resumed[-1].validation_losses
    assert validation == whole[-1].validation_losses


@pytest.mark.full
def test_dropout_resumes_to_the_last_bit_without_a_random_state_for_each_rank(corpus: Path, tmp_path: Path) -> None:
    dropout = ["--hidden-dropout", 0.1, "--train-iters", 4]
    run(corpus, tmp_path / "whole", 2, *dropout)
    run(corpus, tmp_path / "parts", 2, *dropout, "--save", tmp_path / "save", "--exit-interval", 2)
    run(corpus, tmp_path / "parts", 2, *dropout, "--load", tmp_path / "save")
    assert step_losses(tmp_path / "parts") == step_losses(tmp_path / "whole")


SLIPS: dict[str, tuple[list[object], str]] = {
    "more iterations": (["--lr-decay-iters", 20], "total number of iterations .*give --override-opt-param-scheduler"),
    "finished": (["--train-iters", 2], "the training is finished, .*Give a larger --train-iters"),
    "wider": (["--hidden-size", 64], r"shape \[2, 32\], and these flags give \[2, 64\]: give the flags of the model"),
    "deeper": (["--num-layers", 3], r"shape \[2, 32\], and these flags give \[3, 32\]: give the flags of the model"),
    "of another format": (["--ckpt-format", "torch"], "is of another format: give --ckpt-format torch_dist"),
    "without states": (["--load", "NO_STATES"], "has no states of this optimizer|--no-load-optim"),
    "with experts": (
        "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none".split(),
        "has no decoder.*: give the flags of the model that wrote it",
    ),
}


@pytest.fixture(scope="module")
def two_steps(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save checkpoints after two steps and return the folder of the first; ``NO_STATES`` has no optimizer states."""
    folder = tmp_path_factory.mktemp("slips")
    begin = ["--hdp-tokens-per-rank", 256, "--train-iters", 2, *TORCH_DIST]
    for name, more in (("save", []), ("NO_STATES", ["--no-save-optim"])):
        train_ranks(1, *MODEL, *TRAIN, "--data-path", corpus, *HDP, *begin, "--save", folder / name, *more)
    return folder / "save"


@pytest.mark.parametrize("name", sampled(SLIPS, ["without states"]))
def test_slips_of_a_second_run_end_in_one_line_that_names_the_flag(name: str, corpus: Path, two_steps: Path) -> None:
    flags, line = SLIPS[name]
    flags = [two_steps.parent / "NO_STATES" if flag == "NO_STATES" else flag for flag in flags]
    again = ["--hdp-tokens-per-rank", 256, "--train-iters", 3, *TORCH_DIST, "--load", two_steps]
    (outcome,) = train_ranks(1, *MODEL, *TRAIN, "--data-path", corpus, *HDP, *again, *flags)
    assert outcome.code == 2
    assert re.search(f"error: .*({line})", outcome.text.splitlines()[-1])
    assert "Traceback" not in outcome.text


def send_sigterm(step: int, runtime: Any, model: Any) -> None:
    print_step(runtime, model)
    if runtime.rank == 2 and runtime.step.batch.step_index + 1 == step:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.full
def test_sigterm_on_one_rank_saves_and_ends_all(
    corpus: Path, whole_run: tuple[list[list[str]], list[float]], tmp_path: Path
) -> None:
    documents, losses = whole_run
    save = tmp_path / "save"
    entry = partial(train_with, partial(send_sigterm, 3))
    begun = run(corpus, tmp_path, 4, "--save", save, "--exit-signal-handler", entry=entry)
    assert begun[0].code == 0
    assert "exiting program after receiving SIGTERM." in begun[0].text
    assert documents_in_order(begun) == documents[:3]
    resumed = run(corpus, tmp_path, 4, "--load", save)
    assert documents_in_order(resumed) == documents[3:]
    assert step_losses(tmp_path) == losses


def let_time_run_out(step: int, runtime: Any, model: Any) -> None:
    from megatron.training import training

    if runtime.rank == 1 and runtime.step.batch.step_index + 1 == step:
        training._TRAIN_START_TIME -= 3600


@pytest.mark.full
def test_exit_duration_saves_and_ends_all(corpus: Path, tmp_path: Path) -> None:
    save = tmp_path / "save"
    entry = partial(train_with, partial(let_time_run_out, 2))
    outcomes = run(corpus, tmp_path, 4, "--save", save, "--exit-duration-in-mins", 50, entry=entry)
    assert outcomes[0].code == 0
    assert "exiting program after" in outcomes[0].text
    assert len(step_losses(tmp_path)) == 2
    assert (save / "latest_checkpointed_iteration.txt").read_text().strip() == "2"
