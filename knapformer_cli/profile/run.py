"""What a run logged: the lengths of its steps, and what they took.

N steps, R ranks.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from knapformer_cli.profile.mix import MOST, Batch, Mix

PARTS = ("step", "data", "plan", "route")


@dataclass(frozen=True, eq=False)
class Measured:
    """Seconds of the run's steps, each of the slowest rank; busy_NR by rank, where ranks are CPUs."""

    layout: str
    number_N: np.ndarray
    step_N: np.ndarray
    data_N: np.ndarray
    plan_N: np.ndarray
    route_N: np.ndarray
    busy_NR: np.ndarray | None

    def figures(self) -> dict[str, Any]:
        """Means over steps, for JSON."""
        busy = None if self.busy_NR is None else self.busy_NR.mean(0).tolist()
        means = {f"{part}_seconds": float(getattr(self, f"{part}_N").mean()) for part in PARTS}
        return {"layout": self.layout, "steps": self.number_N.tolist(), **means, "busy_seconds": busy}


def read_run(folder: Path, layout: str, steps: int) -> tuple[Mix, Measured]:
    """The last `steps` logged steps of a run; ValueError where it logged no metrics, or no sound lengths."""
    from knapformer_cli.training.metrics import read_metrics  # seconds, as all of training

    metrics = {row["step"]: row for row in read_metrics(folder / "metrics.jsonl")}
    if not metrics:
        raise ValueError(f"{folder} has no metrics.jsonl with steps; profile.run names the folder of a run")
    path, rows = folder / "lengths.jsonl", {}
    for row in read_metrics(path):
        if rule := _broken_rule(row):
            raise ValueError(f"{path} step {row['step']}: {rule}")
        if row["length"]:
            rows[row["step"]] = row
    numbers = sorted(metrics.keys() & rows.keys())
    if not numbers:
        raise ValueError(
            f"{folder} has no lengths.jsonl of its logged steps; train with logging.lengths=true"
        )
    names, ranks = rows[numbers[-1]]["sources"], len(rows[numbers[-1]]["per_rank"])
    # A run may have gone on with other ranks: its last part is what is asked about.
    numbers = [number for number in numbers if len(rows[number]["per_rank"]) == ranks][-steps:]
    batches = []
    for number in numbers:
        row = rows[number]
        if row["sources"] != names:
            last = numbers[-1]
            raise ValueError(
                f"{path} step {number}: sources {row['sources']} are not {names}, as in step {last}"
            )
        per_rank = np.array(row["per_rank"], np.int64)
        home_S = np.repeat(np.arange(len(per_rank)), per_rank)
        batches.append(Batch(np.array(row["length"], np.int64), home_S, np.array(row["source"], np.int64)))
    mix = Mix(f"lengths logged by {folder}", ranks, names, batches, numbers)
    taken = [metrics[number] for number in numbers]

    def column(name: str) -> np.ndarray:
        return np.array([row[name] for row in taken], float)

    # Processor time means nothing where the work is on a GPU, and the run says so.
    busy_NR = column("busy_seconds") if taken[-1]["busy_max_over_mean"] is not None else None
    seconds = {f"{part}_N": column(f"{part}_seconds") for part in PARTS}
    return mix, Measured(layout, number_N=np.array(numbers), **seconds, busy_NR=busy_NR)


def _broken_rule(row: dict[str, Any]) -> str:
    """What is wrong with a row of lengths.jsonl, in words; empty where nothing is."""
    names = row.get("sources")
    if type(row["step"]) is not int:
        return "step must be a whole number"
    if not (names and isinstance(names, list) and all(isinstance(name, str) for name in names)):
        return "sources must be a list of names"
    bounds = {"length": (1, MOST), "source": (0, len(names) - 1), "per_rank": (0, MOST)}
    for name, (least, most) in bounds.items():
        values = row.get(name)
        if not isinstance(values, list):
            return f"{name} must be a list of whole numbers"
        for value in values:
            if type(value) is not int or not least <= value <= most:
                return f"{name} {value!r} is no whole number from {least} to {most}"
    lengths, sources, ranked = len(row["length"]), len(row["source"]), sum(row["per_rank"])
    if not lengths == sources == ranked:
        return f"length has {lengths} sequences, source {sources} and per_rank {ranked}; they must agree"
    return ""
