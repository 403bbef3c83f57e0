"""What became of a submitted run: state, logs, cancelling."""

import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from knapformer_cli.slurm.commands import slurm
from knapformer_cli.slurm.ending import last_step, newest_checkpoint
from knapformer_cli.slurm.snapshot import RECORD, read_snapshot

JOB = "JOB"  # RUN/JOB holds the number of its newest job
ACTIVE = ("PENDING", "RUNNING", "SUSPENDED", "CONFIGURING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD")

# Why a job waits, for those who do not know Slurm's words by heart.
REASONS = {
    "None": "Slurm has not looked at it yet",
    "Resources": "the nodes it needs are busy",
    "Priority": "jobs of higher priority come first",
    "Dependency": "it depends on a job that has not ended as it should",
    "DependencyNeverSatisfied": "the job it depends on ended otherwise; it will never start",
    "BeginTime": "it may not start yet; after a requeue Slurm waits two minutes",
    "JobHeldUser": "you hold it; scontrol release lets it go",
    "JobHeldAdmin": "an administrator holds it",
    "ReqNodeNotAvail": "nodes it asks for are down or reserved",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives",
    "PartitionTimeLimit": "it asks for more time than the partition gives",
    "PartitionDown": "the partition is down",
    "JobArrayTaskLimit": "as many elements of its array run as may run at once",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as your QOS allows",
    "QOSMaxGRESPerUser": "you have as many GPUs as your QOS allows",
    "AssocGrpGRES": "your account has as many GPUs as it may have",
    "launch_failed_requeued_held": "its start failed; scontrol release lets it try again",
}


@dataclass(frozen=True)
class JobState:
    """A job as Slurm knows it."""

    number: str
    state: str  # PENDING, RUNNING, COMPLETED, ...; FORGOTTEN when Slurm knows it no more
    reason: str = ""
    nodes: str = ""
    restarts: int = 0
    ran: str = ""
    limit: str = ""
    start: str = ""


def status_command(run: Path) -> None:
    """Print where the run stands; of a sweep, where each of its runs stands."""
    elements = sorted(path.parent for path in run.glob(f"[0-9]*/{JOB}"))
    for number, folder in enumerate(elements or [run]):
        print("\n" * (number > 0) + "\n".join(f"{name:<10} {what}" for name, what in _lines(folder) if what))


def logs_command(run: Path, lines: int, follow: bool) -> None:
    """Print the end of the newest log of the run; follow it until the job has ended."""
    log = _log(run)
    with log.open(errors="replace") as file:
        print("".join(file.readlines()[-lines:]), end="", flush=True)
        while follow:
            over = active_job(run) is None  # asked first, so that what the job wrote until then is read
            sys.stdout.write(file.read())
            sys.stdout.flush()
            if over:
                return
            time.sleep(2)


def cancel_command(run: Path) -> None:
    """Cancel the job of the run, or all elements of a sweep; the ranks save before they end."""
    number = _number(run)
    job = active_job(run)
    if job is None:
        raise ValueError(f"job {number} of {run} has ended already; knapformer slurm status {run} says how")
    slurm("scancel", number)
    saved = newest_checkpoint(run)
    print(f"cancelled job {number}; the newest checkpoint so far is {saved or 'none'}")


def active_job(run: Path) -> JobState | None:
    """The job of the run when it waits or runs."""
    if not _has_job(run) or shutil.which("scontrol") is None:
        return None
    found = [job for job in _ask(_number(run)) if job.state in ACTIVE]
    return found[0] if found else None


def _lines(run: Path) -> Iterator[tuple[str, str]]:
    number = _number(run)
    job = (_ask(number) or [JobState(number, "FORGOTTEN")])[0]
    yield "run", str(run)
    yield "job", f"{job.number}{f' on {job.nodes}' if job.nodes else ''}"
    yield "state", _in_words(job)
    if (run / "config.yaml").is_file():  # a profile has none
        step = last_step(run)
        yield "step", f"{'none yet' if step is None else step} of {_steps(run)}"
        yield "checkpoint", newest_checkpoint(run) or "none yet"
    yield "restarts", str(job.restarts) if job.state != "FORGOTTEN" else ""
    yield "code", _code(run)
    yield "ended", _said(run, r"job \d+ ended: (.*)") if job.state not in ("RUNNING", "COMPLETING") else ""


def _in_words(job: JobState) -> str:
    if job.state == "PENDING":
        starts = f", starts {job.start}" if job.start not in ("", "Unknown", "N/A") else ""
        return f"PENDING ({job.reason}: {REASONS.get(job.reason, 'see squeue(1)')}){starts}"
    if job.state == "FORGOTTEN":
        return "Slurm knows this job no more; what the log says is below"
    return f"{job.state} for {job.ran} of {job.limit}"


def _said(run: Path, line: str) -> str:
    """What stands in the last such line of the newest log."""
    log = _newest_log(run)
    found = re.findall(f"^{line}$", log.read_text(errors="replace"), re.MULTILINE) if log else []
    return found[-1] if found else ""


def _code(run: Path) -> str:
    """Which code the newest start ran; a script of one's own may run any folder."""
    code = Path(_said(run, r"job \d+, start .*, code (.*)"))
    return read_snapshot(code).in_words() if (code / RECORD).is_file() else ""


def _steps(run: Path) -> int:
    from knapformer_cli.config import load_config

    return load_config(run / "config.yaml").training.steps


def _has_job(run: Path) -> bool:
    return (run / JOB).is_file() or any(run.glob(f"[0-9]*/{JOB}"))


def _number(run: Path) -> str:
    """The job of the run; of a sweep's folder, the job of the whole array."""
    for path in (run / JOB, *sorted(run.glob(f"[0-9]*/{JOB}"))):
        if path.is_file():
            number = path.read_text().strip()
            return number if path.parent == run else number.partition("_")[0]
    raise ValueError(
        f"{run} holds no {JOB} file, so nothing was submitted there; see `knapformer slurm train`"
    )


def _newest_log(run: Path) -> Path | None:
    """Where the job writes; an element of an array writes beside its siblings."""
    number = _number(run)
    found = [*run.glob("logs/slurm-*.out"), *run.parent.glob(f"logs/slurm-{number}.out")]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def _log(run: Path) -> Path:
    log = _newest_log(run)
    if log is None:
        raise ValueError(f"{run} has no log yet; knapformer slurm status {run} says what its job waits for")
    return log


def _ask(number: str) -> list[JobState]:
    """The job, or the elements of its array; empty when Slurm does not know it any more."""
    try:
        text = slurm("scontrol", "show", "job", "--oneliner", number)
    except ValueError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    return [_job_state(line) for line in text.splitlines() if line.startswith("JobId=")]


def _job_state(line: str) -> JobState:
    known = dict(word.split("=", 1) for word in line.split() if "=" in word)
    array = known.get("ArrayJobId")
    return JobState(
        number=f"{array}_{known['ArrayTaskId']}" if array else known["JobId"],
        state=known["JobState"],
        reason=known["Reason"],
        nodes=known["NodeList"].replace("(null)", ""),
        restarts=int(known["Restarts"]),
        ran=known["RunTime"],
        limit=known["TimeLimit"],
        start=known["StartTime"],
    )
