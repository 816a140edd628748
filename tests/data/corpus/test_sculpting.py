"""Windows of a data set on disk contain each token once, and documents of one topic, for any number of tasks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from bytescale_ext.data.corpus import sculpting
from bytescale_ext.data.corpus.embed import load_space
from bytescale_ext.data.corpus.neighbours import nearest_centres
from bytescale_ext.data.corpus.sculpting import REPORT, SculptJob, embedded_pieces, sculpt_stages
from bytescale_ext.data.corpus.windows_file import load_windows
from bytescale_ext.json_input import json_settings
from bytescale_ext.plan.sculpt.baselines import concatenated
from bytescale_ext.plan.sculpt.check import check_windows
from bytescale_ext.plan.sculpt.pieces import OVERFLOWS
from bytescale_ext.plan.sculpt.quality import quality_of
from bytescale_ext.plan.sculpt.sculpt import SculptSettings, sculpt
from tests.data.cleaning import run_steps
from tests.data.corpus.books import texts, write_texts

SETTINGS = SculptSettings(1000)


def job_of(root: Path, number: int = 120, name: str = "a", partition_pieces: int = 1 << 14) -> SculptJob:
    write_texts(root / "docs", texts(number)[0])
    return SculptJob(
        str(root / "docs"), SETTINGS, None, root / name, root / f"{name}.windows.npy", partition_pieces=partition_pieces
    )


def run(job: SculptJob, tasks: int = 1) -> tuple[np.ndarray, dict[str, object]]:
    job.work.mkdir()
    for stage in sculpt_stages(job, tasks):
        run_steps(stage.steps, stage.tasks)
    return load_windows(job.output)[0], json_settings((job.work / REPORT).read_text())


@pytest.mark.full
@pytest.mark.slow
def test_one_partition_has_the_windows_of_all_pieces_together(tmp_path: Path) -> None:
    job = job_of(tmp_path)
    table, report = run(job)
    corpus = write_texts(tmp_path / "docs", texts()[0])
    pieces = embedded_pieces(corpus, 1000, None, SETTINGS.seed)
    expected = sculpt(pieces, SETTINGS, nearest_centres)
    assert np.array_equal(table, expected.table)
    ours = quality_of(table, pieces, 1000)
    assert {name: report[name] for name in dataclasses.asdict(ours)} == pytest.approx(dataclasses.asdict(ours))
    assert ours.relevance > 1.5 * quality_of(concatenated(pieces, 1000, 1), pieces, 1000).relevance
    assert (report["cut"], report["tokens_kept"], report["documents_longer_than_context"]) == (0, 1, 0)
    sizes = np.bincount(expected.cluster, weights=pieces.length)
    assert (report["clusters"], report["largest_cluster_tokens"]) == (len(sizes), sizes.max())


@pytest.mark.slow
def test_the_number_of_tasks_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sculpting, "_SHARD_DOCUMENTS", 70)
    monkeypatch.setattr(sculpting, "_PARTITION_WINDOWS", 1)
    jobs = [job_of(tmp_path, 600, f"w{tasks}", partition_pieces=90) for tasks in (1, 2, 4)]
    made = [run(job, tasks) for job, tasks in zip(jobs, (1, 2, 4), strict=True)]
    assert jobs[0].num_shards == 9
    assert jobs[0].num_partitions > 4
    assert jobs[0].output.read_bytes() == jobs[1].output.read_bytes() == jobs[2].output.read_bytes()
    assert made[0][1] == made[1][1] == made[2][1]
    corpus = write_texts(tmp_path / "docs", texts(600)[0])
    check_windows(made[0][0], corpus.lengths, 1000, "none")
    pieces = embedded_pieces(corpus, 1000, None, SETTINGS.seed)
    together = quality_of(sculpt(pieces, SETTINGS, nearest_centres).table, pieces, 1000)
    assert quality_of(made[0][0], pieces, 1000).relevance > 0.9 * together.relevance


@pytest.mark.slow
def test_windows_have_documents_of_one_pass(tmp_path: Path) -> None:
    made = texts(60)[0]
    corpus = write_texts(tmp_path / "docs", [*made, *made[:30]])
    job = SculptJob(str(tmp_path / "docs"), SETTINGS, None, tmp_path / "w", tmp_path / "w.windows.npy", (0, 60))
    table, report = run(job)
    check_windows(table, corpus.lengths, 1000, "none")
    passes = table["document"] >= 60
    assert len(set(table["window"][passes]) & set(table["window"][~passes])) == 0
    assert report["documents"] == 90


@pytest.mark.slow
def test_similar_documents_are_neighbours_in_their_window(tmp_path: Path) -> None:
    jobs = [dataclasses.replace(job_of(tmp_path, name=order), order=order) for order in ("corpus", "related")]
    (plain, _), (related, _) = map(run, jobs)
    assert np.array_equal(np.sort(related, order=("window", "document", "start")), plain)
    assert not np.array_equal(related, plain)
    pieces = embedded_pieces(write_texts(tmp_path / "docs", texts()[0]), 1000, None, SETTINGS.seed)
    cosines = []
    for table in (plain, related):
        vectors, same = pieces.vectors[table["document"]], np.diff(table["window"]) == 0
        cosines.append(float(np.sum(vectors[1:] * vectors[:-1], axis=1)[same].mean()))
    assert cosines[1] > cosines[0]
    assert load_windows(jobs[1].output)[1].order == "related"


@pytest.mark.slow
def test_a_partition_that_cannot_be_split_is_made_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sculpting, "_SHARD_DOCUMENTS", 70)
    monkeypatch.setattr(sculpting, "_PARTITION_WINDOWS", 1)
    corpus = write_texts(tmp_path / "docs", ["the same words"] * 400)
    job = SculptJob(
        str(tmp_path / "docs"),
        SculptSettings(150),
        None,
        tmp_path / "w",
        tmp_path / "w.windows.npy",
        partition_pieces=40,
    )
    table, _ = run(job)
    assert (job.num_partitions, json_settings((job.work / "fit.json").read_text())["largest"]) == (1, 80)
    check_windows(table, corpus.lengths, 150, "none")


@pytest.mark.slow
def test_the_sample_fits_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents beyond the sample have vectors, too."""
    monkeypatch.setattr(sculpting, "FITTED", 60)
    monkeypatch.setattr(sculpting, "_SAMPLE_TOKENS", 1)
    job = job_of(tmp_path, 300)
    _, report = run(job)
    assert len(load_space(job.work / "space.npz").components) <= 6
    assert report["tokens_kept"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("overflow", OVERFLOWS)
def test_documents_that_are_all_longer_than_a_window_are_cut(overflow: str, tmp_path: Path) -> None:
    corpus = write_texts(tmp_path / "docs", texts()[0])
    context = int(corpus.lengths.min()) - 1
    table, report = run(dataclasses.replace(job_of(tmp_path), settings=SculptSettings(context, overflow)))
    check_windows(table, corpus.lengths, context, overflow)
    assert report["documents_longer_than_context"] == len(corpus.lengths)
    assert table["length"].max() == context
    if overflow != "truncate":
        assert table["length"].sum() == corpus.lengths.sum()
