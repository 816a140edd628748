"""The whole experiment with a tiny model, stopped and gone on with."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.data.byte_model import ModelSize
from scripts.bench.data.helps import (
    ARMS,
    Trial,
    check_folder,
    interval,
    made_by,
    main,
    pieces_of,
    prepare,
    read_documents,
    run_all,
    text_of,
)
from scripts.bench.data.related_texts import Document, tokens_of, windows_of

TRIAL = Trial(
    context=512,
    first_context=128,
    first_tokens=8000,
    tokens=8000,
    windows=2,
    probes=3,
    seeds=2,
    model=ModelSize(16, 1, 1, 32),
)


def documents(count: int = 300) -> list[Document]:
    """Return documents of 60 files; those of one file share a name."""
    random = np.random.RandomState(0)
    words = [f"word{number}" for number in range(80)]
    return [
        Document(
            f"Of topic_number_{i % 60}: {' '.join(random.choice(words, 14))} in topic_number_{i % 60}.".encode(),
            f"file{i % 60}",
        )
        for i in range(count)
    ]


def test_all_ways_hold_the_same_documents() -> None:
    some = documents(60)
    pieces, tokens = pieces_of(some), [tokens_of(one.text) for one in some]
    for arm in ARMS:
        windows = windows_of(made_by(arm, pieces, 512, 1), tokens)
        assert np.array_equal(np.sort(np.concatenate(windows)), np.sort(np.concatenate(tokens)))
        assert max(map(len, windows)) <= 512


def test_held_out_files_are_not_trained_on() -> None:
    texts = prepare(documents(), TRIAL)
    trained = [bytes(np.minimum(one, 255).astype(np.uint8)) for one in [*texts.first, *texts.documents]]
    for probe in texts.probes:
        name = bytes(probe.found[probe.begin - 3 : probe.end].astype(np.uint8))
        assert name.startswith(b"topic_number_")
        assert not any(name + b":" in one for one in trained)
    assert len(texts.probes) == 3
    assert set(texts.held_out) == {"related", "unrelated"}
    assert all(len(windows) == 2 for windows in texts.held_out.values())


def test_too_few_texts_are_told() -> None:
    with pytest.raises(ValueError, match="too few texts: "):
        prepare(documents(40), TRIAL)


def test_a_run_goes_on_and_gives_the_same(tmp_path: Path) -> None:
    texts = prepare(documents(), TRIAL)
    rows = run_all(tmp_path, texts, TRIAL, 1)
    assert [(row["arm"], row["seed"]) for row in rows] == [(arm, seed) for seed in range(2) for arm in ARMS]
    assert all(math.isfinite(value) for row in rows for name, value in row.items() if name != "arm")
    kept = tmp_path / "sculpt-1.json"
    kept.unlink()
    (tmp_path / "sculpt-0.json").write_text(json.dumps(rows[3] | {"name found": -1.0}))
    again = run_all(tmp_path, texts, TRIAL, 1)
    assert again[7] == rows[7]  # trained again from the first training that was kept
    assert again[3]["name found"] == -1.0  # read, not repeated
    lines = text_of(rows).splitlines()
    assert lines[0] == "| | concatenation | best fit | nearest neighbours | sculpt |"
    assert sum(line.startswith("| related") for line in lines) == 8
    assert not list(tmp_path.glob("*.part"))


def test_intervals() -> None:
    mean, half = interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert half == pytest.approx(4.303 / 3**0.5)
    assert math.isnan(interval([1.0])[1])


def test_differences_are_of_the_same_seed() -> None:
    rows = [
        {"arm": arm, "seed": seed, "loss": base + gain}
        for seed, base in enumerate((1.0, 5.0, 9.0))
        for arm, gain in (("concatenation", 0.0), ("sculpt", -0.5))
    ]
    assert "| loss | -0.5000 (0.0000) |" in text_of(rows)
    assert "| loss | 5.000 | 4.500 |" in text_of(rows)


def test_a_folder_of_other_settings_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path / "runs", "a")
    check_folder(tmp_path / "runs", "a")
    with pytest.raises(ValueError, match="holds runs of other settings"):
        check_folder(tmp_path / "runs", "b")


def test_documents_of_packages(tmp_path: Path) -> None:
    page = tmp_path / "python3.11" / "html" / "a.rst.txt"
    page.parent.mkdir(parents=True)
    page.write_text("Title\n=====\n\n" + "Some words of this page. " * 8)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b.rst.txt").write_text(page.read_text())
    (found,) = read_documents(tmp_path, replace(TRIAL, shortest=100))
    assert found.file == "python3.11/html/a.rst.txt"


def test_missing_packages_end_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["helps.py", "--folder", str(tmp_path / "runs"), "--debian", str(tmp_path)])
    assert main() == 2
    assert capsys.readouterr().err == "error: too few texts: 0 and 0 bytes for the two trainings\n"
    assert not (tmp_path / "runs").exists()
