"""Signals, kills and stops, on real processes: what is saved, who is named, how the run goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch.distributed as dist

from knapformer_cli.config import to_yaml
from knapformer_cli.failures import Failure, read_failures, write_failure
from knapformer_cli.launch import resolve
from knapformer_cli.training import preempt
from knapformer_cli.training.checkpoint import complete_checkpoints, read_progress
from knapformer_cli.training.metrics import read_metrics
from knapformer_cli.training.watch import Stand, find_late
from tests.knapformer_cli.test_cli import COMMAND, losses, processes_of
from tests.knapformer_cli.test_training import train_here
from tests.spawn import spawn
from tests.waiting import wait_for

STEPS = 10


def when(condition: Callable[[], bool], act: Callable[[], None]) -> None:
    """Act once, from a thread, as soon as the condition holds."""
    Thread(target=lambda: wait_for(condition, 120) and act(), daemon=True).start()


def ask_this_process() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def interrupt_until_done(group: dist.ProcessGroup, overrides: list[str], folder: Path) -> None:
    """Train to the end, with USR1 to one rank after every few steps, now this rank and now that."""
    for attempt in range(STEPS):
        preempt.listen()
        more = len(losses(folder)) + 1 + attempt % 3
        if attempt % group.size() == group.rank():
            when(lambda more=more: len(losses(folder)) >= more, ask_this_process)
        dist.barrier()
        train_here(group, overrides)
        dist.barrier()
        marker = preempt.read_marker(folder)
        if marker is None:
            assert attempt >= 2, "the run was to be interrupted at least twice"
            return
        assert marker["step"] == len(losses(folder))
        assert marker["signal"] == "SIGUSR1"
        kept = complete_checkpoints(folder / "checkpoints")
        assert marker["checkpoint"] == (kept[-1].name if kept else None)
    raise AssertionError(f"not done after {STEPS} attempts")


def interrupt_and_not(group: dist.ProcessGroup, small: list[str], folder: Path) -> None:
    words = [*small, f"training.steps={STEPS}"]
    train_here(group, [*words, f"run.dir={folder}/whole"])
    interrupt_until_done(group, [*words, f"run.dir={folder}/interrupted"], folder / "interrupted")


def test_preempted_at_any_step_again_and_again_the_curve_is_the_same_bit_for_bit(
    tmp_path: Path, small: list[str]
) -> None:
    spawn([interrupt_and_not], 2, small, tmp_path)
    assert len(losses(tmp_path / "whole")) == STEPS
    assert losses(tmp_path / "interrupted") == losses(tmp_path / "whole")
    assert not (tmp_path / "interrupted" / "PREEMPTED").exists()


def begin(folder: Path, *words: str, workers: int = 0, **options: Any) -> subprocess.Popen[str]:
    """`knapformer train` into the folder, in a process group of its own; `workers` decode for each rank."""
    return subprocess.Popen(
        [*COMMAND, "train", *words, f"data.workers={workers}", f"run.dir={folder}"],
        env={**os.environ, "RUN_OF_THIS_TEST": str(folder)},
        start_new_session=True,
        text=True,
        stderr=subprocess.PIPE,
        **options,
    )


def end_of(job: subprocess.Popen[str], seconds: float = 120) -> str:
    _, said = job.communicate(timeout=seconds)
    return said


def ranks_of(folder: Path) -> list[int]:
    """Process ids of the ranks of a run, the first one first."""
    pids = []
    for pid in processes_of(folder):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"knapformer_cli.worker" in words:
            pids.append(pid)
    return sorted(pids)


def preempted(folder: Path, said: str) -> dict[str, Any]:
    """What the marker of a run says, which its last line and its checkpoints bear out."""
    marker = json.loads((folder / "PREEMPTED").read_text())
    step, kept = marker["step"], complete_checkpoints(folder / "checkpoints")
    assert marker["checkpoint"] == (f"{step:010d}" if step else None)
    assert [path.name for path in kept[-1:]] == ([f"{step:010d}"] if step else [])
    assert len(losses(folder)) == step
    assert said.strip().splitlines()[-1].startswith(f"preempted by {marker['signal']} at step {step} (")
    assert "Traceback" not in said
    assert "wandb is off" not in said
    assert wait_for(lambda: not processes_of(folder), 15), processes_of(folder)
    return marker


def test_whatever_signal_whenever_it_comes_the_run_is_saved_and_goes_on_as_the_same_wandb_run(
    tmp_path: Path, small: list[str]
) -> None:
    folder = tmp_path / "run"
    words = [*small, "training.steps=1000", "logging.wandb=offline"]

    def ignoring() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # as `trap '' USR1` does

    job = begin(folder, *words, preexec_fn=ignoring)
    assert wait_for(lambda: len(ranks_of(folder)) == 2, 120)
    os.kill(job.pid, signal.SIGUSR1)  # to the launcher alone, while its ranks still import
    said = end_of(job)
    assert job.returncode == 0, said
    assert preempted(folder, said)["step"] == 0

    job = begin(folder, *words, workers=1, preexec_fn=ignoring)
    assert wait_for(lambda: len(losses(folder)) >= 3, 120)
    assert not (folder / "PREEMPTED").exists()
    os.killpg(job.pid, signal.SIGUSR1)  # as Slurm does: launcher, ranks, decoding processes, wandb's
    os.killpg(job.pid, signal.SIGUSR1)
    said = end_of(job)
    assert job.returncode == 0, said
    step = preempted(folder, said)["step"]
    assert step >= 3

    job = begin(folder, *words)
    assert wait_for(lambda: len(losses(folder)) >= step + 2, 120)
    os.killpg(job.pid, signal.SIGTERM)  # what scancel sends
    said = end_of(job)
    assert job.returncode == 0, said
    assert preempted(folder, said)["signal"] == "SIGTERM"
    one = read_progress(complete_checkpoints(folder / "checkpoints")[-1]).wandb_id
    assert {path.name.rpartition("-")[2] for path in (folder / "wandb").glob("offline-run-*")} == {one}


def test_a_stopped_rank_ends_the_job_with_its_name_and_the_collective(
    tmp_path: Path, small: list[str]
) -> None:
    folder = tmp_path / "stopped"
    job = begin(folder, *small, "training.steps=1000", "launch.timeout=10")
    assert wait_for(lambda: len(losses(folder)) >= 3, 120)
    os.kill(ranks_of(folder)[1], signal.SIGSTOP)
    start = time.monotonic()
    said = end_of(job)
    assert time.monotonic() - start < 10 + 25
    assert job.returncode == 1
    last = said.strip().splitlines()[-1]
    assert "error: rank 1 on " in last
    assert "gives no sign of life and did not arrive within 10 s at the " in last
    assert "where rank 0 waits" in last
    assert wait_for(lambda: not processes_of(folder), 15), processes_of(folder)


def node(config: Path, rank: int, *words: str) -> subprocess.Popen[str]:
    """One of two nodes of a job, both on this machine, by names of their own."""
    given = ["--nodes", "2", "--node-rank", str(rank), "--id", "job-0", "--address", "127.0.0.1", *words]
    return subprocess.Popen(
        [sys.executable, "-m", "knapformer_cli.node", str(config), *given],
        env={**os.environ, "SLURMD_NODENAME": f"n{rank}", "RUN_OF_THIS_TEST": str(config.parent)},
        start_new_session=True,
        text=True,
        stderr=subprocess.PIPE,
    )


def test_after_a_killed_rank_all_nodes_start_again_then_tell_which_rank_failed_first_and_where(
    tmp_path: Path, small: list[str]
) -> None:
    folder = tmp_path / "nodes"
    folder.mkdir()
    words = ["training.steps=1000", "launch.ranks=1", "launch.nodes=2", "checkpoint.every=3"]
    config = folder / "config.yaml"
    config.write_text(to_yaml(resolve([*small, *words, f"run.dir={folder}"])))
    jobs = [node(config, rank, "--head", "127.0.0.1:29817", "--restarts", "1") for rank in (0, 1)]
    assert wait_for(lambda: len(losses(folder)) >= 4, 120)
    before = ranks_of(folder)
    os.kill(before[1], signal.SIGKILL)
    assert wait_for(lambda: len(ranks_of(folder)) == 2 and not set(ranks_of(folder)) & set(before), 60)
    again = losses(folder)
    assert wait_for(lambda: len(losses(folder)) > len(again) + 2, 120)  # it went on from a checkpoint
    start = time.monotonic()
    os.kill(ranks_of(folder)[1], signal.SIGKILL)
    said = [end_of(job) for job in jobs]
    assert time.monotonic() - start < 60
    assert [job.returncode for job in jobs] == [1, 1], said
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")][:4] == [1, 2, 3, 4]
    assert any("resumed at step 3" in text for text in said), said
    assert any("restart 1: rank " in text and "ended without a word, as rank " in text for text in said), said
    ends = [text.strip().splitlines()[-1] for text in said]
    assert ends[0] == ends[1]
    assert "failed: ended by signal 9 (SIGKILL)" in ends[0]
    assert "rank 0 on n" in ends[0] or "rank 1 on n" in ends[0]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--head", "nowhere.invalid:29500", "--id", "j"], "'nowhere.invalid' cannot be resolved"),
        (["--head", "n0", "--id", "j"], "write HOST:PORT"),
        (
            ["--head", "localhost:29500", "--id", "j", "--nodes", "2", "--node-rank", "2"],
            "must lie in 0 to 1",
        ),
    ],
)
def test_a_node_refuses_in_one_sentence(
    words: list[str], rule: str, tmp_path: Path, small: list[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(resolve([*small, f"run.dir={tmp_path}"])))
    command = [sys.executable, "-m", "knapformer_cli.node", str(config), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert rule in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_reason_of_a_failure_comes_before_what_followed_from_it(tmp_path: Path) -> None:
    write_failure(tmp_path, Failure(0, "n0", 7, "RuntimeError: Connection closed by peer", 1, time=1.0))
    write_failure(tmp_path, Failure(2, "n1", 7, "ValueError: a tensor of the wrong shape", 1, time=3.0))
    write_failure(tmp_path, Failure(3, "n1", None, "ended by signal 9 (SIGKILL)", -9, time=2.0))
    assert [failure.rank for failure in read_failures(tmp_path)] == [3, 2, 0]


def test_the_late_rank_is_the_silent_one_else_the_one_that_does_not_wait_else_the_one_behind() -> None:
    waits, reads = Stand(4, "the gathering of lengths", True), Stand(4, "the reading of data", False)
    late, why = find_late({0: waits, 2: reads}, 3, 60)
    assert late == 1
    assert "no sign of life" in why
    assert "the gathering of lengths, where rank 0 waits" in why
    late, why = find_late({0: waits, 1: waits, 2: reads}, 3, 60)
    assert late == 2
    assert "still at the reading of data" in why
    late, why = find_late({0: waits, 1: Stand(3, "the gradient norm", True), 2: waits}, 3, 60)
    assert late == 1
    assert "network" in why
