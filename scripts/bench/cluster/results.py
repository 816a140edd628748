"""The results of ``speed.py``: one JSON file, written after each run, so a second start can continue."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bytescale_ext.new_file import write_text
from bytescale_ext.plan.cost.model_cost import ModelCost


@dataclass(frozen=True)
class Step:
    """Figures of one step, over all ranks."""

    tokens_per_second: float
    megabytes_sent: float
    imbalance: float
    loss: float


@dataclass(frozen=True)
class Run:
    """One run of an arm in a case.

    Attributes:
        steps: all steps; the first does not count.
        split: shares of the time of all ranks, and bytes between nodes per step (``scripts/cluster/usage.py``).
        predicted_seconds: predicted seconds of the passes of the traced step; None if not predicted.
        measured_seconds: measured seconds of the same passes.
    """

    steps: tuple[Step, ...]
    split: dict[str, float]
    predicted_seconds: float | None
    measured_seconds: float

    @classmethod
    def from_json(cls, value: dict[str, object]) -> Run:
        """Invert ``asdict``."""
        steps = value["steps"]
        assert isinstance(steps, list), f"{steps=}"
        return cls(**{**value, "steps": tuple(Step(**step) for step in steps)})  # type: ignore[arg-type]


@dataclass
class Results:
    """All runs of one setting.

    Attributes:
        path: file of the results.
        setting: settings that must be equal for runs to be compared.
        cost: profile of the ranks; None before the profile.
        runs: runs by case and arm, or the reason why an arm cannot run.
    """

    path: Path
    setting: dict[str, float]
    cost: ModelCost | None = None
    runs: dict[str, dict[str, list[Run] | str]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, setting: dict[str, float]) -> Results:
        """Read the file if there is one. Raises ValueError if it has another setting or other contents."""
        if not path.exists():
            return cls(path, setting)
        results = cls.read(path)
        if results.setting != setting:
            raise ValueError(f"--results {path} has another setting, {results.setting}: give another file")
        return results

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the file. Raises ValueError if it holds no results."""
        try:
            value = json.loads(path.read_text())
            runs = {
                case: {arm: rows if isinstance(rows, str) else [Run.from_json(run) for run in rows]
                       for arm, rows in arms.items()} for case, arms in value["runs"].items()
            }  # fmt: skip
            cost = value["cost"] and ModelCost.from_json(value["cost"])
            return cls(path, value["setting"], cost, runs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no results of speed.py ({error})") from None

    def write(self) -> None:
        """Replace the file."""
        value = {
            "setting": self.setting,
            "cost": None if self.cost is None else self.cost.to_json(),
            "runs": {case: {arm: rows if isinstance(rows, str) else [asdict(run) for run in rows]
                            for arm, rows in arms.items()} for case, arms in self.runs.items()},
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(value, indent=1) + "\n")

    def of(self, case: str, arm: str) -> list[Run]:
        """Return the runs of an arm so far."""
        runs = self.runs.get(case, {}).get(arm, [])
        return [] if isinstance(runs, str) else runs

    def add(self, case: str, arm: str, run: Run | str) -> None:
        """Add a run, or the reason why the arm cannot run, and write the file."""
        self.runs.setdefault(case, {})[arm] = run if isinstance(run, str) else [*self.of(case, arm), run]
        self.write()

    def cases(self, names: Iterable[str] | None = None) -> dict[str, dict[str, list[Run]]]:
        """Return the arms that ran in each case, in the order of running."""
        return {
            case: {arm: runs for arm, runs in arms.items() if not isinstance(runs, str) and runs}
            for case, arms in self.runs.items()
            if names is None or case in names
        }

    def refused(self, case: str) -> dict[str, str]:
        """Return the reason of each arm that cannot run in a case."""
        return {arm: reason for arm, reason in self.runs[case].items() if isinstance(reason, str)}
