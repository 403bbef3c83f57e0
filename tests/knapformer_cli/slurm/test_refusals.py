"""What cannot be submitted ends in a sentence and exit code 2, and leaves nothing behind."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.knapformer_cli.slurm.cluster import Cluster
from tests.knapformer_cli.slurm.conftest import knapformer, log, submit

pytestmark = pytest.mark.slurm


def refused(run: Path, words: list[str], said: str) -> None:
    code, _, error = knapformer("train", *words, f"run.dir={run}")
    assert (code, error.count("\n")) == (2, 0)
    assert said in error


def jobs(cluster: Cluster) -> list[str]:
    return cluster.run("squeue", "--noheader", "--format=%i").split()


def test_a_refused_submission_leaves_no_run_folder_and_no_job(
    cluster: Cluster, tmp_path: Path, job: list[str]
) -> None:
    run = tmp_path / "run"
    refused(run, [*job, "--submit", "--partition=nowhere"], "invalid partition specified: nowhere")
    refused(run, [*job, "--submit", "slurm.options=['--dependency=sometime:3']"], "Slurm refused sbatch")
    assert not run.exists()
    assert jobs(cluster) == []


def test_without_slurm_nothing_is_written_unless_the_script_alone_is_wanted(
    tmp_path: Path, job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    monkeypatch.setenv("PATH", f"{tmp_path}/no-slurm-here")
    refused(run, [*job, "--submit"], "sbatch is not on this machine's PATH")
    assert not run.exists()
    code, output, error = knapformer("train", *job, f"run.dir={run}")
    assert code == 0, error
    assert output.startswith((run / "submit.slurm").read_text())
    code, _, error = knapformer("status", str(run))
    assert (code, "nothing was submitted there" in error) == (2, True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB: the configuration fits, the code does not."""
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_disk_that_is_full_or_read_only_is_named_and_nothing_is_submitted(
    cluster: Cluster, small_disk: Path, job: list[str]
) -> None:
    run = small_disk / "run"
    refused(run, [*job, "--submit"], f"run.dir {run} cannot be written: No space left on device")
    assert os.listdir(small_disk) == []
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    refused(run, [*job, "--submit"], f"run.dir {run} cannot be written: Read-only file system")
    assert jobs(cluster) == []


def test_a_run_folder_has_one_job_at_a_time(cluster: Cluster, tmp_path: Path, job: list[str]) -> None:
    run = tmp_path / "run"
    number = submit(run, *job, "slurm.options=[--hold]")
    refused(run, [*job, "--submit"], f"run.dir {run} has job {number}, which is PENDING")
    next_one = submit(run, *job, "slurm.options=[--hold]", f"--dependency=afterany:{number}")
    assert sorted(jobs(cluster)) == sorted([number, next_one])
    cluster.run("scancel", number, next_one)


def test_a_job_that_slurm_has_forgotten_is_told_from_its_log(
    cluster: Cluster, tmp_path: Path, job: list[str]
) -> None:
    run = tmp_path / "run"
    assert knapformer("train", *job, f"run.dir={run}")[0] == 0
    (run / "JOB").write_text("99999\n")
    (run / "logs" / "slurm-99999.out").write_text("job 99999 ended: finished at step 3\n")
    code, said, _ = knapformer("status", str(run))
    assert code == 0
    assert "state      Slurm knows this job no more" in said
    assert "ended      finished at step 3" in said
    code, _, error = knapformer("cancel", str(run))
    assert (code, "job 99999" in error) == (2, True)


def test_a_head_node_that_cannot_be_resolved_ends_the_job_instead_of_training_alone(
    cluster: Cluster, tmp_path: Path, job: list[str]
) -> None:
    run = tmp_path / "run"
    number = submit(run, *job, "--nodes=1", "--partition=lost")
    cluster.until(lambda: cluster.job(number)["JobState"] == "FAILED", 60, "the end of the job")
    assert cluster.job(number)["ExitCode"] == "2:0"
    assert log(run).splitlines()[-1] == (
        f"job {number} ended: failed, the head node 'n2' of n2 cannot be resolved"
    )
    assert not (run / "metrics.jsonl").exists()
