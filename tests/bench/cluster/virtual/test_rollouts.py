"""Groups of ``rollouts.py``: lengths, data sets, and the page of made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bytescale_ext.data.corpus import sidecar
from scripts.bench.cluster.virtual.bench import Results
from scripts.bench.cluster.virtual.cases import SCALE
from scripts.bench.cluster.virtual.rollouts import ARMS, CASES, GroupCase, Trace, largest_difference, page, write_groups

LINES = [{"input_length": 3200 * number, "output_length": 320 + number, "timestamp": 0} for number in range(1, 60)]


def test_groups_have_published_lengths(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, LINES)) + "\n")
    trace = Trace.read(tmp_path / "trace.jsonl")
    case = GroupCase("made up", size=3, context=100_000)
    groups = trace.groups(case, 20, seed=0)
    assert trace.groups(case, 20, seed=0) == groups
    assert len({prompt for prompt, _ in groups}) == 20, "no prompt twice"
    for prompt, answers in groups:
        assert (prompt + max(answers)) * SCALE <= case.context
        assert len(answers) == 3
        assert set(answers) <= {10, 11, 12}


def test_documents_of_a_group_begin_with_its_prompt(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    write_groups(tmp_path / "docs", [(5, (2, 3)), (4, (1, 6))], seed=0)
    tokens = np.fromfile(tmp_path / "docs.bin", dtype=np.uint16)
    assert len(tokens) == 7 + 8 + 5 + 10
    assert (tokens[:5] == tokens[7:12]).all()
    assert (tokens[15:19] == tokens[20:24]).all()
    name = str(tmp_path / "docs")
    assert sidecar.group_bounds(name, whole=True).tolist() == [0, 2, 4]
    mask = sidecar.open_sidecar(sidecar.weights_of(name))
    assert [int(part.sum()) for part in np.split(mask, [7, 15, 20])] == [2, 3, 1, 6]
    for path, kind in (
        (sidecar.advantages_of(name), sidecar.ADVANTAGES),
        (sidecar.old_logprobs_of(name), sidecar.LOGPROBS),
        (f"{name}.base", sidecar.LOGPROBS),
    ):
        sidecar.check_sidecar(path, name, kind, whole=True)


def result(seconds: float, loss: float, tokens: int) -> dict[str, Any]:
    steps = {links: [{"seconds": seconds}, {"seconds": 2 * seconds}] for links in ("400", "100")}
    return {"losses": [1.0, loss], "tokens": [tokens, tokens], "minutes": 1.5, "steps": steps}


def test_the_page_compares_steps_with_ours(tmp_path: Path) -> None:
    case, arms = CASES[0]
    found = {name: result(1.0 + number, 2.0 + 2e-6 * number, 100 * (1 + number)) for number, name in enumerate(arms)}
    cases = {str(case): found}
    assert largest_difference(cases) == pytest.approx(3e-6)
    text = page(Results(tmp_path / "results.json", {}, cases))
    assert "**emulated with device times** of an H100" in text
    assert "took 6 minutes" in text
    assert "\n3e-06 at most (relative)" in text
    assert f"| {ARMS['ours'].title} | 200 | 1.50 |  | 1.50 |  |" in text
    assert f"| {ARMS['copies'].title} | 400 | 3.00 | 2.00x to 2.00x | 3.00 | 2.00x to 2.00x |" in text
    assert str(GroupCase("made up", loss="dpo", size=2)) == "DPO, 8 GPUs"
