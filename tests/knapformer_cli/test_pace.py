"""A slow rank or node is reported by name, from the same work on every rank."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch.distributed as dist

from knapformer_cli.training.metrics import read_metrics
from knapformer_cli.training.pace import Paces
from tests.knapformer_cli.test_training import train_here
from tests.spawn import spawn


def totals(seconds_R: list[float], steps: int) -> np.ndarray:
    """What ranks count that take `seconds_R` for each of `steps` pieces of work."""
    return np.array([[steps, int(seconds * steps * 1e9)] for seconds in seconds_R])


def compare(hosts: list[str], seconds_R: list[float], threshold: float = 1.5) -> str | None:
    paces = Paces(hosts, threshold, window=10)
    assert paces.compare(10, totals([1.0] * len(hosts), 10)) is None  # warming up
    assert paces.compare(15, totals(seconds_R, 15)) is None  # within the window
    return paces.compare(20, totals([1.0] * len(hosts), 10) + totals(seconds_R, 10))


def test_a_rank_slower_than_the_threshold_is_named_and_a_node_when_all_its_ranks_are() -> None:
    hosts = ["n0", "n0", "n1", "n1", "n2", "n2"]
    assert compare(hosts, [1, 1, 1.4, 1, 1, 1]) is None
    said = compare(hosts, [1, 1, 1, 2, 1, 1])
    assert said is not None
    assert said.endswith("rank 3 on n1 2.0 times")
    said = compare(hosts, [1, 1, 2, 3, 1, 1])
    assert said is not None
    assert said.endswith("node n1, all 2 ranks, 3.0 times")
    assert compare(hosts, [1, 1, 2, 3, 1, 1], threshold=0) is None


def test_of_two_ranks_the_faster_one_is_the_measure() -> None:
    said = compare(["n0", "n1"], [3, 1])
    assert said is not None
    assert said.endswith("rank 0 on n0 3.0 times")


def train_beside_a_busy_process(group: dist.ProcessGroup, overrides: list[str]) -> None:
    """Rank 1 has to share its processor with a process of higher priority."""
    cpus = sorted(os.sched_getaffinity(0))
    mine = {cpus[group.rank() % len(cpus)]}
    os.sched_setaffinity(0, mine)
    busy = None
    if group.rank() == 1:
        busy = subprocess.Popen(
            [sys.executable, "-c", "while True: pass"], preexec_fn=lambda: os.sched_setaffinity(0, mine)
        )
        os.nice(6)
    try:
        train_here(group, overrides)
    finally:
        if busy is not None:
            busy.kill()


def test_a_rank_that_really_is_slow_is_reported_once_a_window(
    tmp_path: Path, small: list[str], capfd
) -> None:
    words = [*small, "training.steps=26", "launch.window=5", f"run.dir={tmp_path}/run"]
    spawn([train_beside_a_busy_process], 2, words)
    said = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith("slow over the last 5 steps")
    ]
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    windows = [rows[step - 1] for step in (10, 15, 20, 25)]
    assert [row["step"] for row in windows] == [10, 15, 20, 25]
    # What else this machine does may slow rank 0 as well, now and then.
    assert [1] in [row["slow_ranks"] for row in windows]
    assert max(row["pace_max_over_median"] for row in windows) > 1.5
    assert len(said) == sum(bool(row["slow_ranks"]) for row in windows)
    assert any("rank 1 on " in line and "rank 0" not in line for line in said)
    assert rows[3]["pace_max_over_median"] is None
