"""Without ``--hybrid-data-parallel`` Megatron is unchanged; with it, losses on equally long documents are equal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.corpora import write_documents
from tests.e2e.devices import on_ghosts
from tests.e2e.oracle import train_documents_one_by_one
from tests.e2e.training import HDP, MODEL, TRAIN, train, train_apart
from tests.sample import sampled

pytestmark = pytest.mark.ranks

SEQ_LENGTH = 256
COMMON = [*MODEL, *TRAIN]
PER_TOKEN = ["--micro-batch-size", 1, "--calculate-per-token-loss"]
WITHOUT_US = (
    "import runpy, sys; sys.modules.update(dict.fromkeys(['bytescale_ext', 'megatron.bytescale'])); "
    "sys.argv.pop(0); runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Program that runs another program without our packages."""


@pytest.fixture(scope="module")
def full_documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("corpus") / "docs", lengths=(SEQ_LENGTH,) * 30, copies=1)


@pytest.mark.parametrize("sharded", sampled(["replicated", "zero1"], ["zero1"]))
def test_full_documents_train_as_megatrons_data_parallelism(sharded: str, full_documents: Path) -> None:
    optimizer = ["--use-distributed-optimizer"] if sharded == "zero1" else []
    flags = [*COMMON, "--data-path", full_documents, *optimizer]
    stock = train(4, *flags, *PER_TOKEN, entry=train_documents_one_by_one)
    ours = train(4, *flags, *HDP, "--hdp-tokens-per-rank", SEQ_LENGTH)
    assert len(stock.losses) == 3
    assert ours.losses == pytest.approx(stock.losses, rel=1e-5)


def test_one_process_trains_without_torchrun(corpus: Path) -> None:
    (alone,) = train_apart([*COMMON, *HDP, "--hdp-tokens-per-rank", SEQ_LENGTH, "--data-path", corpus])
    assert len(alone.losses) == 3


@pytest.mark.full
def test_checkpoints_load_where_our_package_is_missing(full_documents: Path, tmp_path: Path) -> None:
    """Plain Megatron loads the checkpoints of two trainings, which differ only in their format."""
    flags = [*COMMON, *HDP, "--hdp-tokens-per-rank", SEQ_LENGTH, "--data-path", full_documents]
    folders = []
    for form in ("torch", "torch_dist"):
        train(2, *flags, "--use-distributed-optimizer", "--ckpt-format", form, "--save", tmp_path / form)
        folders.append(tmp_path / form / "iter_0000003")
    program = [sys.executable, "-W", "ignore", "-c", WITHOUT_US, Path(__file__).with_name("stock_load.py"), *folders]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert float(done.stdout.split()[-1]) < 1e-6


def train_and_print_status() -> None:
    import pretrain_gpt_hdp
    from megatron.bytescale import status

    pretrain_gpt_hdp.main()
    print("\n".join(f"PATCH {line}" for line in status()))


def patch_lines(text: str, *features: str) -> list[str]:
    """Return the printed patch rows of these features."""
    lines = [line for line in text.splitlines() if line.startswith("PATCH ")]
    assert lines
    needed = [line.split(": ")[0].split("  ")[-1].split(", ") for line in lines]
    return [line for line, names in zip(lines, needed, strict=True) if set(names) & set(features)]


@pytest.mark.parametrize("data", ["--mock-data", "--data-path"])
def test_without_the_flag_megatron_is_untouched(data: str, full_documents: Path) -> None:
    source = [data] if data == "--mock-data" else [data, full_documents]
    flags = ["--micro-batch-size", 2, "--seq-length", 64, "--train-iters", 3]
    outcome = train(2, *COMMON, *source, *flags, entry=train_and_print_status)
    assert len(outcome.losses) == 3
    assert outcome.losses[-1] < outcome.losses[0]
    assert " hdp:" not in outcome.text.partition("PATCH")[0]
    lines = patch_lines(outcome.text, "hdp", "slices")
    assert lines
    assert not [line for line in lines if " replaced " in line]
    kinds = [] if on_ghosts() else ["cpu"]
    assert all(" replaced " in line for line in patch_lines(outcome.text, "always", *kinds))


@pytest.mark.full
def test_stock_flags_of_validation_data_and_losses_are_honoured(full_documents: Path) -> None:
    flags = [*COMMON, "--data-path", full_documents, "--micro-batch-size", 2, "--seq-length", 64, "--train-iters", 2]
    every = "--full-validation --multiple-validation-sets --eval-interval 1 --eval-iters 1 --split 80,20,0".split()
    outcome = train(1, *flags, *every, "--check-for-spiky-loss", "--mid-level-dataset-surplus", 0.5)
    assert len(outcome.losses) == 2
    assert len(outcome.validation_losses) == 3  # after each iteration and at the end


def test_data_flags_that_do_not_fit_are_refused_before_anything_is_built(full_documents: Path) -> None:
    flags = [*COMMON, "--data-path", full_documents, "--micro-batch-size", 2, "--dataloader-fast-cache-load"]
    outcome = train(1, *flags)
    assert outcome.code == 2
    assert "Megatron refuses these arguments: --data-cache-path must be provided" in outcome.text


def test_with_the_flag_every_row_is_replaced(full_documents: Path) -> None:
    flags = [*COMMON, "--data-path", full_documents, *HDP, "--hdp-tokens-per-rank", 128, "--train-iters", 1]
    lines = patch_lines(train(2, *flags, entry=train_and_print_status).text, "hdp", "always")
    assert lines
    assert [line for line in lines if " replaced " not in line and " specialized " not in line] == []


@pytest.mark.full
def test_stock_loss_is_the_mean_over_tokens_of_its_own_samples(full_documents: Path) -> None:
    """Two micro-batches of one sample equal one micro-batch of two: the stock path has none of our code."""
    flags = [*COMMON, "--data-path", full_documents, "--seq-length", 64]
    losses = [train(2, *flags, "--micro-batch-size", size, "--calculate-per-token-loss").losses for size in (1, 2)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
