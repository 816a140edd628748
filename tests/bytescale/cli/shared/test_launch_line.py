"""A dry run has the groups, ring traffic and refusals of real runs."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data.corpus.windows_file import WindowsHeader, save_windows, sha256_of
from bytescale_ext.plan.sculpt.pieces import ROW
from tests.data.sources import write_data_set
from tests.e2e.corpora import write_documents
from tests.e2e.training import HDP, MODEL, TRAIN, record_steps, train_ranks
from tests.harness import run_ranks
from tests.sample import sampled

pytestmark = pytest.mark.ranks

ONE_STEP = [*MODEL, *TRAIN, *HDP, "--train-iters", "1"]
PIPELINES = ["--pipeline-model-parallel-size", "2", "--seq1f1b-slices", "2"]
BIG = [
    *ONE_STEP,
    "--use-distributed-optimizer",
    "--ckpt-format",
    "torch_dist",
    "--tensor-model-parallel-size",
    "2",
    *PIPELINES,
]


def dry_run(rank: int, world: int, flags: list[str], world_size: int, lengths: list[int], of: int) -> Any:
    from megatron.bytescale.cli.shared.launch_line import resolve_launch

    launch = resolve_launch([*flags, "--cpu"], world_size, of, 8, on_cpu=True)
    return dataclasses.asdict(launch.plan(lengths))


def predicted(flags: list[str], world_size: int, lengths: list[int], of: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = run_ranks(dry_run, 1, flags, world_size, lengths, of, init_group=False)[0]
    return found


def drawn(rank: int, world: int, flags: list[str]) -> list[int]:
    from megatron.bytescale.cli.shared.launch_line import resolve_launch

    return resolve_launch([*flags, "--cpu"], 2, 0, 8, on_cpu=True).draw(None, seed=0)


def test_a_step_of_windows_is_drawn_from_them(tmp_path: Path) -> None:
    write_data_set(tmp_path / "a", [[[1] * 90], [[2] * 50], [[3] * 120]])
    table = np.array([(0, 0, 0, 90), (0, 1, 0, 50), (1, 2, 0, 120)], dtype=ROW)
    header = WindowsHeader(256, "none", 1, sha256_of(tmp_path / "a.idx"))
    save_windows(tmp_path / "a.windows.npy", table, header)
    flags = [*ONE_STEP, "--data-path", str(tmp_path / "a"), "--sculpt-windows", str(tmp_path / "a.windows.npy")]
    flags = [*flags, "--global-batch-size", "2", "--hdp-tokens-per-rank", "128"]
    for attention, expected in (("window", [120, 140]), ("document", [50, 90, 120])):
        found = run_ranks(drawn, 1, [*flags, "--sculpt-attention", attention], init_group=False)[0]
        assert sorted(found) == expected


def test_a_step_of_tokens_is_drawn_until_it_has_them(tmp_path: Path) -> None:
    write_data_set(tmp_path / "a", [[[1] * 90]] * 3)
    flags = [*ONE_STEP, "--data-path", str(tmp_path / "a"), "--global-batch-size", "2", "--hdp-tokens-per-rank", "128"]
    found = run_ranks(drawn, 1, [*flags, "--hdp-global-tokens", "1000"], init_group=False)[0]
    assert found == [90] * 11


@pytest.mark.parametrize(
    ("num_ranks", "more"), sampled([(2, []), (4, PIPELINES)], [(2, [])]), ids=["rings", "rings in slices"]
)
def test_ring_traffic_is_that_of_the_run(num_ranks: int, more: list[str], tmp_path: Path) -> None:
    corpus = write_documents(tmp_path / "docs", copies=1)
    flags = [*ONE_STEP, "--hdp-tokens-per-rank", "128", *more]
    outcomes = train_ranks(
        num_ranks, *flags, "--data-path", corpus, "--hdp-log-dir", tmp_path / "log", entry=record_steps
    )
    (record,) = outcomes[0].records()
    (row,) = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    found = predicted(flags, num_ranks, record["lengths"])
    assert row["megabytes_sent_per_step"] > 0
    traffic = float(found["step"]["ring traffic"].removesuffix(" MB").replace(",", ""))
    assert traffic == pytest.approx(row["megabytes_sent_per_step"], rel=0.01)
    assert len(found["memory_gb"]) == num_ranks // 2


def test_memory_under_a_policy_is_its_forecast() -> None:
    deep = [*ONE_STEP, "--num-layers", "4"]
    flags = [*deep, "--activation-policy", "memo", "--swap-fraction", "0.5", "--host-memory-gb", "0.01"]
    found, plain = predicted(flags, 4, [60] * 8), predicted(deep, 4, [60] * 8)
    (row,), (whole,) = found["memory_gb"], plain["memory_gb"]
    assert 0 < row["host"] <= 0.01
    assert row["states"] == whole["states"]
    assert row["total"] == pytest.approx(row["states"] + row["activations"])


def test_states_count_memories_on_the_device_and_leave_out_what_is_in_host_memory() -> None:
    both = [*ONE_STEP, *PIPELINES, "--hdp-tokens-per-rank", "128", "--untie-embeddings-and-output-weights"]
    both += ["--num-layers", "4"]
    plain = predicted(both, 4, [60] * 8)["memory_gb"]
    memory = [*both, *"--ngram-layers 1,4 --ngram-rows 1000 --ngram-dim 8 --ngram-orders 2 --ngram-heads 1".split()]
    for one, other in zip(predicted(memory, 4, [60] * 8)["memory_gb"], plain, strict=True):
        assert one["states"] - other["states"] == pytest.approx(16e-9 * (1000 * 8 + 2 * 32 * 8))
    host = predicted([*both, "--host-tables", "embedding", "--ckpt-format", "torch_dist"], 4, [60] * 8)["memory_gb"]
    assert host[0]["states"] < 0.9 * plain[0]["states"]
    assert host[1]["states"] == plain[1]["states"]


def test_states_that_leave_the_device() -> None:
    """8 of 16 bytes per float32 parameter stay, and each stage's pages are in host memory."""
    flags = [*ONE_STEP, *PIPELINES, "--hdp-tokens-per-rank", "128", "--num-layers", "4"]
    plain, paged = (
        predicted([*flags, *more], 4, [60] * 8)["memory_gb"]
        for more in ([], ["--state-policy", "paged", "--state-page-mb", "0.00390625"])
    )
    for one, other in zip(paged, plain, strict=True):
        assert one["states"] == pytest.approx(other["states"] / 2)
        assert one["pages"] == pytest.approx(other["states"] / 2, abs=6e-5)
        assert one["total"] == pytest.approx(other["total"] - other["states"] / 2)


def type_command(rank: int, world: int, words: list[str]) -> str:
    from megatron.bytescale import cli

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        assert cli.main(words) == 0
    return text.getvalue()


def test_the_command_plans_a_thousand_processes(tmp_path: Path) -> None:
    """Lengths are from a published distribution, or from the data set of the launch line."""
    sizes = "--seq-length 65536 --max-position-embeddings 65536 --hdp-tokens-per-rank 1024 --global-batch-size 512"
    flags = [*BIG, *sizes.split(), "--cpu"]
    text = run_ranks(type_command, 1, ["dry-run", "--ranks", "1024", "--sampler", "github", "--", *flags],
                     init_group=False)[0]  # fmt: skip
    assert "1,024 = 2 tensor-parallel x 2 stages x 256 HDP ranks, of up to 1,024 tokens each" in text
    assert "0, 2, ..., 510 (256 ranks)" in text
    assert "512 of " in text
    assert "documents on several nodes in hierarchical rings" in text
    assert "1,024 tokens each; CPU" in text
    corpus = write_documents(tmp_path / "docs", copies=1)
    words = ["dry-run", "--ranks", "4", "--json", "--", *ONE_STEP, "--data-path", str(corpus), "--cpu"]
    found = json.loads(run_ranks(type_command, 1, words, init_group=False)[0])
    assert found["step"]["documents"].startswith("8 of ")
    assert found["groups"]["HDP"] == [0, 1, 2, 3]


def test_a_line_is_for_gpus_unless_it_says_otherwise() -> None:
    """A machine without GPUs plans for a cluster's GPUs, where norms and SwiGLU are single kernels."""
    flags = [*ONE_STEP, *"--bf16 --global-batch-size 64 --seq-length 4096 --max-position-embeddings 4096".split()]
    words = ["dry-run", "--ranks", "64", "--sampler", "github", "--json", "--", *flags]
    engine = [*words, "--transformer-impl", "transformer_engine"]
    gpus, with_engine, cpus = (
        json.loads(run_ranks(type_command, 1, one, init_group=False)[0]) for one in (words, engine, [*words, "--cpu"])
    )
    assert all(one["about"]["processes"].endswith("; GPUs") for one in (gpus, with_engine))
    assert cpus["about"]["processes"].endswith("; CPU")
    held = [one["memory_gb"][0]["activations"] for one in (with_engine, gpus, cpus)]
    assert held == sorted(held)
    assert held[0] < held[-1]


def refuse(rank: int, world: int, flags: list[str], world_size: int) -> str:
    from megatron.bytescale.cli.shared.launch_line import resolve_launch

    with pytest.raises(ValueError, match=r"\S") as refusal:
        resolve_launch([*flags, "--cpu"], world_size, 0, 8, on_cpu=True)
    return str(refusal.value)


@pytest.mark.parametrize(
    ("flags", "world_size", "reason"),
    [
        ([*MODEL, *TRAIN], 8, "add --hybrid-data-parallel"),
        (BIG, 6, "6 processes cannot be divided among --tensor-model-parallel-size 2"),
        (ONE_STEP, 16, "--global-batch-size 8 is not a multiple of the 16 data-parallel ranks"),
        ([*ONE_STEP, "--context-parallel-size", "2"], 8, "--context-parallel-size"),
        ([*ONE_STEP, "--seq-length", "1024", "--max-position-embeddings", "1024"], 8, "--seq-length 1024"),
    ],
)
def test_what_training_refuses_is_refused(flags: list[str], world_size: int, reason: str) -> None:
    assert reason in run_ranks(refuse, 1, flags, world_size, init_group=False)[0]


FLEX = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --moe-token-dispatcher-type flex --bf16"
RESHARDED = "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient"


@pytest.mark.parametrize(
    "words",
    [
        "--use-distributed-optimizer --ckpt-format torch --cpu",
        f"--use-distributed-optimizer {RESHARDED} --cpu",
        f"{FLEX} --moe-enable-deepep",
    ],
)
def test_what_needs_real_process_groups_is_planned(words: str) -> None:
    """Megatron's checks of a dry run refuse them, but a training does not."""
    line = ["dry-run", "--ranks", "4", "--sampler", "sft", "--json", "--", *ONE_STEP, *words.split()]
    assert json.loads(run_ranks(type_command, 1, line, init_group=False)[0])["memory_gb"]
