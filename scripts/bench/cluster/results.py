"""The results of ``speed.py``: one JSON file, written after each run, so that a run that was ended can go on."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bytescale_ext.plan.cost.model_cost import ModelCost


@dataclass(frozen=True)
class Step:
    """What one step measured: all ranks together."""

    tokens_per_second: float
    megabytes_sent: float
    imbalance: float
    loss: float


@dataclass(frozen=True)
class Run:
    """One run of an arm in a case.

    Attributes:
        steps: all of them; the first one is not counted.
        split: shares of the time of all ranks, and bytes between nodes in a step (``scripts/cluster/usage.py``).
        predicted_seconds, measured_seconds: forward and backward passes of the traced step; None: not predicted.
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
    """Everything that was measured with one setting.

    Attributes:
        path: the file.
        setting: what must not change between runs that are compared.
        cost: what ``bytescale profile`` measured on the ranks; None before that.
        runs: case -> arm -> its runs, or why it cannot run.
    """

    path: Path
    setting: dict[str, float]
    cost: ModelCost | None = None
    runs: dict[str, dict[str, list[Run] | str]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, setting: dict[str, float]) -> Results:
        """Read the file, or begin one. Raises ValueError for one of another setting, and for no results."""
        if not path.exists():
            return cls(path, setting)
        found = cls.read(path)
        if found.setting != setting:
            raise ValueError(f"--results {path} is of another setting, {found.setting}: give another file")
        return found

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the file. Raises ValueError where it is none of ours."""
        try:
            value = json.loads(path.read_text())
            runs = {
                case: {arm: one if isinstance(one, str) else [Run.from_json(run) for run in one]
                       for arm, one in arms.items()} for case, arms in value["runs"].items()
            }  # fmt: skip
            cost = value["cost"] and ModelCost.from_json(value["cost"])
            return cls(path, value["setting"], cost, runs)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} holds no results of speed.py ({error})") from None

    def write(self) -> None:
        """Write the file whole."""
        value = {
            "setting": self.setting,
            "cost": None if self.cost is None else self.cost.to_json(),
            "runs": {case: {arm: one if isinstance(one, str) else [asdict(run) for run in one]
                            for arm, one in arms.items()} for case, arms in self.runs.items()},
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_suffix(".new")
        new.write_text(json.dumps(value, indent=1) + "\n")
        new.replace(self.path)

    def of(self, case: str, arm: str) -> list[Run]:
        """Return the runs of an arm so far."""
        found = self.runs.get(case, {}).get(arm, [])
        return [] if isinstance(found, str) else found

    def add(self, case: str, arm: str, run: Run | str) -> None:
        """Add a run, or say why the arm cannot run, and write the file."""
        self.runs.setdefault(case, {})[arm] = run if isinstance(run, str) else [*self.of(case, arm), run]
        self.write()

    def cases(self, names: Iterable[str] | None = None) -> dict[str, dict[str, list[Run]]]:
        """Return the arms that ran in each case, in the order of running."""
        return {
            case: {arm: one for arm, one in arms.items() if not isinstance(one, str) and one}
            for case, arms in self.runs.items()
            if names is None or case in names
        }

    def refused(self, case: str) -> dict[str, str]:
        """Return the arms that cannot run in a case, and why."""
        return {arm: one for arm, one in self.runs[case].items() if isinstance(one, str)}
