"""Record the arms of each case, replay them at each speed of the links, and keep the results in one JSON file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from bytescale_ext.new_file import write_text
from bytescale_ext.plan.evaluate.bounds import lower_bounds
from bytescale_ext.plan.step.sizes import Cluster
from scripts.bench.cluster.virtual.cases import ARMS, DYNAMIC, SCALE, Arm, Case, Planned
from scripts.bench.cluster.virtual.links import Links
from scripts.bench.cluster.virtual.recording import Recording
from scripts.bench.cluster.virtual.replay import model_steps
from scripts.bench.cluster.virtual.times import planned_cost
from scripts.bench.progress import progress

LINKS: Final = (400.0, 200.0, 100.0)
"""Gbit/s of each device between nodes."""

type CaseResult = dict[str, dict[str, Any]]
"""Results of the arms of a case by name: ``losses``, ``tokens`` and ``bounds`` of the steps, and ``minutes``. By the
speed of the links: ``steps`` (seconds, and seconds by kind) and, if plans follow the costs, ``predicted`` seconds. The
first step does not count and is left out. Dynamic plans have ``megatron``, their source."""


@dataclass
class Results:
    """All results of one device.

    Attributes:
        path: file of the results.
        setting: settings that must be equal for results to be compared.
        cases: results by case.
    """

    path: Path
    setting: dict[str, Any]
    cases: dict[str, CaseResult] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, setting: dict[str, Any]) -> Results:
        """Return the results of a file, or new ones. Raises ValueError for results of another setting."""
        if not path.exists():
            return cls(path, setting)
        results = cls.read(path)
        if results.setting != setting:
            raise ValueError(f"--results {path}: it has results of {results.setting}, not of {setting}")
        return results

    @classmethod
    def read(cls, path: Path) -> Results:
        """Return the results of a file, arms in the order of ``ARMS``."""
        value = json.loads(path.read_text())
        cases = {case: {name: arms[name] for name in ARMS if name in arms} for case, arms in value["cases"].items()}
        return cls(path, value["setting"], cases)

    def write(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps({"setting": self.setting, "cases": self.cases}, indent=1) + "\n")


def run_arm(recording: Recording, case: Case, arm_name: str) -> dict[str, Any]:
    """Record and replay one arm; see ``CaseResult``. Raises RuntimeError if a rank fails."""
    folder = recording.folder / str(case).replace(" ", "-").replace(",", "") / arm_name
    result, lengths = replay_arm(recording, case, ARMS[arm_name], folder)
    bounds = [bound(recording, case, of_step) for of_step in lengths]
    return {**source_of_plans(recording, arm_name), **result, "bounds": bounds}


def replay_arm(
    recording: Recording, case: Case, arm: Arm, folder: Path
) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Record and replay one arm: ``CaseResult`` without bounds, and the lengths of each step.

    An arm whose plans follow the costs is recorded for each speed of the links, the others once. Lengths are of the
    sequences of the plan, in recorded tokens. Raises RuntimeError if a rank fails.
    """
    begun, device, times = time.monotonic(), recording.device, recording.times(case, arm)
    steps, predicted, programs = {}, {}, None
    for gbps in LINKS:
        if programs is None or arm.follows_costs:
            programs = replace(recording, gbps=gbps).run(case, arm, folder)
        if arm.follows_costs:
            predicted[f"{gbps:g}"] = predicted_seconds(folder)
        network = (gbps * 1e9 / 8, device.node_latency, device.network_latency)
        replayed = model_steps(programs, times, Links(case.ranks_per_node, device.node_bytes, *network))
        steps[f"{gbps:g}"] = [asdict(step) for step in replayed[1:]]
    assert programs is not None
    lengths = [step["lengths"] for step in steps[f"{LINKS[0]:g}"]]
    for step in (step for replayed in steps.values() for step in replayed):
        del step["lengths"]
    result = {
        "losses": list(programs.losses[1:]),
        "predicted": predicted,
        "tokens": [sum(of_step) * SCALE for of_step in lengths],
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "steps": steps,
    }
    return result, lengths


def predicted_seconds(folder: Path) -> list[float]:
    """Return the seconds that the log of a recording predicts for each step, without the first."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["predicted_over_measured"] * row["step_seconds"] for row in rows[1:]]


def source_of_plans(recording: Recording, arm_name: str) -> dict[str, str]:
    """Return the file that makes dynamic plans under the key ``megatron``; nothing for the other arms."""
    if arm_name != DYNAMIC or recording.megatron is None:
        return {}
    from megatron.bytescale.cli.shared.megatron_dynamic import source_of

    return {"megatron": source_of(recording.megatron)}


def bound(recording: Recording, case: Case, lengths: Sequence[int]) -> float:
    """Return the seconds that no plan can beat, forward and backward, on the fastest links.

    ``lengths``: recorded tokens of the documents.
    """
    cluster = Cluster(case.num_ranks, case.tokens_per_rank // SCALE, case.ranks_per_node)
    cost = planned_cost(recording.times(case, ARMS["ours"]), LINKS[0] * 1e9 / 8)
    return lower_bounds(lengths, cluster, [cost.whole().on(cost.nodes(cluster))]).largest


def run_all(recording: Recording, results: Results, planned: Sequence[Planned]) -> None:
    """Run the missing arms of some cases. ``scripts.cluster.ranks.preload`` must have been called."""
    missing = [
        (row.case, arm) for row in planned for arm in row.arms if arm not in results.cases.get(str(row.case), {})
    ]
    for case, arm in progress(missing, lambda turn: f"{turn[0]}: {turn[1]}"):
        try:
            result = run_arm(recording, case, arm)
        except RuntimeError as error:  # the other arms go on; the next start tries it again
            print(error, file=sys.stderr, flush=True)
            continue
        results.cases.setdefault(str(case), {})[arm] = result
        results.write()
