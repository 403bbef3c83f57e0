"""The batch script of a job: directives for Slurm, what runs, and a body that is the same for every job."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from knapformer_cli.schema import SlurmConfig

TIMES = r"(\d+-)?\d+(:[0-5]?\d){0,2}"
WAITS = r"singleton|after(any|ok|notok|corr|burstbuffer)?(:\d+(_(\d+|\*))?(\+\d+)?)+"


@dataclass(frozen=True)
class Job:
    """What a script is written for; every node sees its paths."""

    name: str
    run: Path  # of an array: the folder that holds 00, 01, ...
    code: Path  # the snapshot
    python: str
    nodes: int
    ask: SlurmConfig
    work: Path | None = None  # where relative paths start; None: where sbatch is called
    array: str | None = None  # elements and how many at once, such as 0-7%2
    dependency: str | None = None
    settings: tuple[str, ...] | None = None  # of the run, for a script that composes its configuration itself
    sweep: tuple[str, ...] = ()  # one more setting for each element of the array


def training_script(job: Job) -> str:
    """The text of RUN/submit.slurm; with settings, a script that needs no run folder written before."""
    about = f"# Trains {job.name}, and goes on after preemption. Slurm reads this file alone: edit it freely."
    return _script(job, about, ["start", *(["compose"] if job.settings is not None else []), "train"])


def profile_script(job: Job) -> str:
    """Calibrates on one device, then profiles the settings; the text of RUN/submit.slurm."""
    about = f"# Measures {job.name} on one device and compares layouts. Slurm reads this file alone."
    return _script(job, about, ["start", "profile"])


def _script(job: Job, about: str, bodies: Sequence[str]) -> str:
    safe = "set -uo pipefail # an unset name ends the script; a command that fails does not"
    head = ["#!/usr/bin/env bash", about, *_aligned(_directives(job, "train" in bodies)), "", safe, ""]
    lines = [*head, *_aligned(_names(job, bodies)), *_site(job.ask)]
    texts = [(files("knapformer_cli.slurm") / f"{body}.sh").read_text() for body in bodies]
    return "\n".join(lines) + "\n" + "".join(texts)


def _directives(job: Job, trains: bool) -> Iterator[tuple[str, str]]:
    ask, log = job.ask, f"slurm-{'%A_%a' if job.array else '%j'}.out"
    for name, value, why in (
        ("job-name", job.name, "in squeue"),
        ("nodes", str(job.nodes), "machines"),
        ("ntasks-per-node", "1", "it starts the ranks of its node"),
        ("gpus-per-node", str(ask.gpus_per_node) if ask.gpus_per_node else None, "a rank each"),
        ("cpus-per-task", None if ask.cpus is None else str(ask.cpus), "of a node, for ranks and decoding"),
        ("mem", ask.memory, "of a node; 0 is all of it"),
        ("time", ask.time, "of one start"),
        ("partition", ask.partition, "queue"),
        ("account", ask.account, "pays"),
        ("qos", ask.qos, "quality of service"),
        ("constraint", ask.constraint, "features that the nodes must have"),
        ("array", job.array, "elements; %N lets N of them run at once"),
        ("dependency", job.dependency, "waits for other jobs"),
        ("signal", f"USR1@{ask.grace}" if trains else None, "so many seconds before its end all ranks save"),
        ("chdir", str(job.work) if job.work else None, "relative paths of the configuration start here"),
        ("output", f"{job.run}/logs/{log}" if job.work else log, "one log for all starts and nodes"),
        ("open-mode", "append", "a requeued job goes on in the same log"),
    ):
        if value is not None:
            yield f"#SBATCH --{name}={_directive(name, value)}", why
    if trains and ask.requeues:
        yield "#SBATCH --requeue", "the job may start again under its number"
    else:
        yield "#SBATCH --no-requeue", "the job starts once"
    for option in ask.options:
        yield f"#SBATCH {option}", "slurm.options"


def _directive(name: str, value: str) -> str:
    """The value as Slurm reads it; ValueError for what would end the line, the quotes or begin a pattern."""
    if re.search(r"[\"'\\\n#]", value) or (name == "chdir" and "%" in value):
        raise ValueError(f"--{name}={value!r} cannot be written into a batch script; use no quotes, # or %")
    return f'"{value}"' if re.search(r"\s", value) else value


def _names(job: Job, bodies: Sequence[str]) -> Iterator[tuple[str, str]]:
    container = _container(job)
    yield f"RUN={_quote(job.run)}", "the run folder: config.yaml, logs, checkpoints"
    yield f"CODE={_quote(job.code)}", "the code that runs"
    yield f"PYTHON={_quote(job.python)}", "of the ranks"
    if "train" in bodies:
        yield (
            f"TELLER={'python3' if container else '$PYTHON'}",
            "says at the end what happened; any Python 3.11",
        )
        yield f"REQUEUES={job.ask.requeues}", "how often a preempted job starts again"
    yield f"CONTAINER=({container})", "options of srun"
    if job.settings is not None:
        yield f"SETTINGS=({shlex.join(job.settings)})", "of the run"
    if "compose" in bodies:
        yield f"SWEEP=({shlex.join(job.sweep)})", "one more setting for each element of an array"


def _container(job: Job) -> str:
    """srun's options of the pyxis plugin; the container sees the run folder and the working folder."""
    if job.ask.container is None:
        return ""
    paths = [path for path in dict.fromkeys([job.work, job.run, job.code]) if path]
    mounts = [f"{path}:{path}" for path in paths] + job.ask.mounts
    return shlex.join([f"--container-image={job.ask.container}", f"--container-mounts={','.join(mounts)}"])


def _site(ask: SlurmConfig) -> list[str]:
    lines = [f"export {name}={_quote(value)}" for name, value in ask.env.items()] + ask.setup
    return ["", "# slurm.env and slurm.setup", *lines] if lines else []


def _quote(value: object) -> str:
    return shlex.quote(str(value))


def _aligned(lines: Iterator[tuple[str, str]]) -> Iterator[str]:
    """Code and what it means, the meanings below each other."""
    pairs = list(lines)
    width = min(44, max(len(code) for code, _ in pairs))
    for code, why in pairs:
        yield f"{code:<{width}} # {why}" if why else code


def check_slurm(ask: SlurmConfig) -> None:
    """Raise ValueError for what no batch script can ask."""
    if ask.gpus_per_node < 0:
        raise ValueError(
            f"slurm.gpus_per_node is {ask.gpus_per_node}; it must be at least 0, which means CPU"
        )
    if ask.requeues < 0:
        raise ValueError(f"slurm.requeues is {ask.requeues}; it must be at least 0")
    if ask.cpus is not None and ask.cpus < 1:
        raise ValueError(f"slurm.cpus is {ask.cpus}; it must be at least 1, or unset")
    if ask.memory is not None and not re.fullmatch(r"\d+[KMGT]?", ask.memory, re.IGNORECASE):
        raise ValueError(
            f"slurm.memory is {ask.memory!r}; write a number with K, M, G or T, or 0 for all of it"
        )
    if ask.partition is not None and not re.fullmatch(r"\S+", ask.partition):
        raise ValueError(
            f"slurm.partition is {ask.partition!r}; write a name, or several as a,b, without spaces"
        )
    if not re.fullmatch(TIMES, ask.time):
        raise ValueError(
            f"slurm.time is {ask.time!r}; write MINUTES, HOURS:MINUTES:SECONDS or "
            "DAYS-HOURS:MINUTES:SECONDS, with less than 60 after a colon"
        )
    if not seconds(ask.time):
        raise ValueError(f"slurm.time is {ask.time!r}; a job must have some time, at least 0:01")
    if not 1 <= ask.grace < seconds(ask.time):
        raise ValueError(
            f"slurm.grace is {ask.grace}; it must be at least 1, and less than slurm.time={ask.time}"
        )


def check_dependency(given: str | None) -> None:
    """Raise ValueError for what sbatch does not read as jobs to wait for."""
    if given is not None and not re.fullmatch(rf"({WAITS})([,?]({WAITS}))*", given):
        raise ValueError(
            f"--dependency is {given!r}; write singleton or TYPE:JOB as afterok:123, several as "
            "afterany:123:124,afterok:125"
        )


def seconds(time: str) -> int:
    """Seconds of Slurm's ways to write a time: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, secs = (*parts, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, secs = parts
    else:
        hours, minutes, secs = 0, *(*parts, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
