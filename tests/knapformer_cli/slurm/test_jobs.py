"""What a job lives through, on a real Slurm of two nodes: the same curve as without any of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from knapformer_cli.schema import SlurmConfig
from knapformer_cli.slurm.ending import last_step
from knapformer_cli.slurm.script import Job, training_script
from knapformer_cli.slurm.snapshot import PACKAGES
from knapformer_cli.training.checkpoint import check_complete, complete_checkpoints
from knapformer_cli.training.metrics import read_metrics
from tests.knapformer_cli.slurm.cluster import Cluster
from tests.knapformer_cli.slurm.conftest import STEPS, knapformer, log, processes, submit
from tests.knapformer_cli.test_training import train_all
from tests.spawn import spawn

pytestmark = pytest.mark.slurm
ROOT = Path(__file__).parents[3]


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(run / "metrics.jsonl")]


def step(run: Path) -> int:
    return last_step(run) or 0


@pytest.fixture(scope="module")
def curve(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> list[float]:
    """The losses of the same run on two ranks without Slurm."""
    run = tmp_path_factory.mktemp("reference") / "run"
    spawn([train_all], 2, [[*small, f"training.steps={STEPS}", f"scheduler.steps={STEPS}", f"run.dir={run}"]])
    return losses(run)


def ends(cluster: Cluster, number: str, seconds: float = 240) -> dict[str, str]:
    """Wait for the end of a job; what Slurm knows of it then."""
    active = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
    cluster.until(lambda: cluster.job(number)["JobState"] not in active, seconds, f"the end of job {number}")
    return cluster.job(number)


def test_a_job_runs_what_was_submitted_and_trains_as_one_machine_does(
    cluster: Cluster, tmp_path: Path, job: list[str], curve: list[float]
) -> None:
    """Submitted from a checkout whose code is broken before the job starts, in that very folder."""
    checkout, run = tmp_path / "checkout", tmp_path / "run"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    words = ["train", *job, f"run.dir={run}", "slurm.options=[--hold]", "--submit"]
    command = [sys.executable, "-m", "knapformer_cli", "slurm", *words]
    subprocess.run(command, cwd=checkout, check=True, timeout=120)
    for broken in ("knapformer_cli/node.py", "knapformer_cli/training/trainer.py", "models/mmdit.py"):
        (checkout / broken).write_text("raise RuntimeError('changed after the submission')\n")
    number = (run / "JOB").read_text().strip()
    assert "PENDING (JobHeldUser: you hold it" in knapformer("status", str(run))[1]
    cluster.run("scontrol", "release", number)
    assert ends(cluster, number)["JobState"] == "COMPLETED", log(run)
    assert losses(run) == pytest.approx(curve, rel=1e-5)
    assert f"code {run}/code/" in log(run)
    said = knapformer("status", str(run))[1]
    assert f"step       {STEPS} of {STEPS}" in said
    assert f"ended      finished at step {STEPS}" in said
    assert re.search(rf"code       version .*, {next((run / 'code').iterdir()).name}", said), said
    assert knapformer("logs", str(run), "--follow", "--lines=1")[1] == log(run).splitlines(True)[-1]


def hold_workers(cluster: Cluster, number: str, run: Path, at: int) -> list[int]:
    """Stop the ranks within a step once `at` steps are done, so that what follows finds them there.

    On a busy machine the warning may come before that step; then there is nothing to stop.
    """
    before = cluster.job(number)["Restarts"]
    cluster.until(
        lambda: step(run) >= at or cluster.job(number)["Restarts"] > before, 150, f"step {at} of {run}"
    )
    ranks = processes(number, "knapformer_cli.worker")
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)
    return ranks


def is_pending(process: int, number: signal.Signals) -> bool:
    """Whether a stopped process has been sent the signal."""
    waiting = re.findall(r"(?:SigPnd|ShdPnd):\s*(\w+)", Path(f"/proc/{process}/status").read_text())
    return any(int(mask, 16) >> (number - 1) & 1 for mask in waiting)


def preempted_while_held(cluster: Cluster, number: str, run: Path, ranks: list[int], start: int) -> None:
    """Let stopped ranks go on once the warning has reached them, and wait until that start is requeued."""
    cluster.until(lambda: all(is_pending(rank, signal.SIGUSR1) for rank in ranks), 150, "USR1 to every rank")
    for rank in ranks:
        os.kill(rank, signal.SIGCONT)
    cluster.until(lambda: cluster.job(number)["Restarts"] == str(start), 90, "the requeue")
    cluster.until(lambda: cluster.job(number)["JobState"] == "PENDING", 90, f"the end of start {start}")
    assert (run / "PREEMPTED").is_file()


def start_again(cluster: Cluster, number: str) -> None:
    """Without the two minutes that Slurm waits after a requeue, and with time to finish."""
    cluster.run("scontrol", "update", f"JobId={number}", "StartTime=now", "TimeLimit=10")


def test_warned_before_its_limit_a_job_saves_and_is_requeued_and_ends_with_the_same_curve(
    cluster: Cluster, tmp_path: Path, job: list[str], curve: list[float]
) -> None:
    run = tmp_path / "run"
    number = submit(run, *job, "--time=2", "slurm.grace=70", "logging.wandb=offline")
    preempted_while_held(cluster, number, run, hold_workers(cluster, number, run, at=8), start=1)
    first = json.loads((run / "PREEMPTED").read_text())
    assert (first["step"], first["signal"]) == (step(run), "SIGUSR1")
    saved = complete_checkpoints(run / "checkpoints")
    assert [int(path.name) for path in saved] == [first["step"]] * (first["step"] > 0)
    waiting = knapformer("status", str(run))[1]
    assert "PENDING (BeginTime: it may not start yet" in waiting
    assert "ended      preempted and requeued (1 of 20) " in waiting
    start_again(cluster, number)
    ranks = hold_workers(cluster, number, run, at=first["step"] + 4)
    cluster.run("scancel", "--signal=USR1", number)
    preempted_while_held(cluster, number, run, ranks, start=2)
    start_again(cluster, number)
    state = ends(cluster, number)
    assert (state["JobState"], state["Restarts"]) == ("COMPLETED", "2")
    assert losses(run) == pytest.approx(curve, rel=1e-5)
    assert len({path.name.rpartition("-")[2] for path in run.glob("wandb/*run-*")}) == 1
    assert not (run / "PREEMPTED").exists()
    assert log(run).splitlines()[-1] == f"job {number} ended: finished at step {STEPS}"
    assert "preempted and requeued (2 of 20)" in log(run)


def test_scancel_leaves_a_whole_checkpoint_and_no_process(
    cluster: Cluster, tmp_path: Path, job: list[str]
) -> None:
    run = tmp_path / "run"
    number = submit(run, *job, "training.steps=100000", "scheduler.decay=constant", "checkpoint.every=3")
    cluster.until(lambda: step(run) >= 6, 120, "step 6")
    assert knapformer("cancel", str(run))[0] == 0
    assert ends(cluster, number, 60)["JobState"] == "CANCELLED"
    cluster.until(lambda: not processes(number), 30, "the end of every process")
    saved = complete_checkpoints(run / "checkpoints")
    assert check_complete(saved[-1]).name == f"{step(run):010d}"
    assert f"ended: stopped by Slurm at step {step(run)} (checkpoint {saved[-1].name})" in log(run)
    code, _, error = knapformer("cancel", str(run))
    assert (code, "has ended already" in error) == (2, True)


def test_at_the_limit_of_requeues_a_preempted_job_ends_and_says_how_to_go_on(
    cluster: Cluster, tmp_path: Path, job: list[str]
) -> None:
    run = tmp_path / "run"
    endless = ["training.steps=100000", "scheduler.decay=constant"]
    number = submit(run, *job, *endless, "--nodes=1", "slurm.requeues=0")
    cluster.until(lambda: step(run) >= 1, 120, "step 1")
    cluster.run("scancel", "--signal=USR1", number)
    state = ends(cluster, number, 90)
    assert (state["JobState"], state["Restarts"]) == ("FAILED", "0")
    assert "preempted and not requeued (slurm.requeues=0 is reached; submit again to go on)" in log(run)
    assert int(complete_checkpoints(run / "checkpoints")[-1].name) == step(run)


def test_a_killed_rank_comes_back_from_the_last_checkpoint_and_without_restarts_left_fails_the_job_by_name(
    cluster: Cluster, tmp_path: Path, job: list[str], curve: list[float]
) -> None:
    run = tmp_path / "run"
    number = submit(run, *job, "launch.restarts=1", "checkpoint.every=5", "training.steps=100000")
    kill_a_rank(cluster, number, run, "n1", after=7)
    cluster.until(lambda: "resumed at step" in log(run), 90, "the restart")
    killed = kill_a_rank(cluster, number, run, "n1", after=STEPS)
    state = ends(cluster, number, seconds=60)
    assert state["JobState"] == "FAILED"
    said = log(run)
    assert re.search(rf"ended: failed with exit code 1 .*rank {killed} on n1 failed.*SIGKILL", said), said
    assert "SIGKILL" in knapformer("status", str(run))[1]
    assert losses(run)[:STEPS] == pytest.approx(curve, rel=1e-5)


def kill_a_rank(cluster: Cluster, number: str, run: Path, node: str, after: int) -> str:
    """End the rank of a node with SIGKILL after so many steps; returns its number."""
    cluster.until(lambda: step(run) >= after, 120, f"step {after}")
    for process in processes(number, "knapformer_cli.worker"):
        environment = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        known = dict(pair.decode().split("=", 1) for pair in environment if b"=" in pair)
        if known["SLURMD_NODENAME"] == node:
            os.kill(process, signal.SIGKILL)
            return known["RANK"]
    raise AssertionError(f"no rank of job {number} on {node}")


def test_an_array_sweep_writes_a_run_folder_each_and_one_wandb_group(
    cluster: Cluster, tmp_path: Path, job: list[str]
) -> None:
    run = tmp_path / "sweep"
    words = [*job, "training.steps=1,2", "--sweep", "--nodes=1", "logging.wandb=offline"]
    code, _, error = knapformer("train", *words, f"run.dir={run}", "--submit")
    assert code == 0, error
    numbers = [(run / element / "JOB").read_text().strip() for element in ("00", "01")]
    for number in numbers:
        assert ends(cluster, number)["JobState"] == "COMPLETED", log(run)
    assert [len(losses(run / element)) for element in ("00", "01")] == [1, 2]
    groups = [
        re.findall(r"group: (\w+)", (run / element / "config.yaml").read_text()) for element in ("00", "01")
    ]
    assert groups == [["sweep"], ["sweep"]]
    assert all(list((run / element / "wandb").glob("*run-*")) for element in ("00", "01"))
    said = knapformer("status", str(run))[1]
    assert [line.split()[-1] for line in said.splitlines() if line.startswith("ended")] == ["1", "2"]


def test_a_stand_alone_script_composes_the_configuration_of_its_element(
    cluster: Cluster, tmp_path: Path, small: list[str]
) -> None:
    """As in scripts/: nothing was written before but the script itself."""
    ask = SlurmConfig(gpus_per_node=0, time="5", grace=30)
    script, run = tmp_path / "job.slurm", tmp_path / "run"
    one = Job("alone", run, ROOT, sys.executable, 1, ask, array="1", settings=(*small, "launch.ranks=1"))
    script.write_text(training_script(replace(one, sweep=("training.steps=2", "training.steps=1"))))
    number = cluster.run("sbatch", "--parsable", f"--output={tmp_path}/log", str(script)).strip()
    assert ends(cluster, f"{number}_1")["JobState"] == "COMPLETED", (tmp_path / "log").read_text()
    assert len(losses(run / "01")) == 1
    assert "ended: finished at step 1" in (tmp_path / "log").read_text()
