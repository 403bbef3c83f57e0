"""`knapformer slurm train`: everything is checked here, then written into the run folder, then submitted."""

import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from knapformer_cli.calibrate import check_lengths
from knapformer_cli.config import compose, expand_sweep
from knapformer_cli.folder import let_go_of_run_folder, write_run_folder
from knapformer_cli.launch import check_data, check_settings
from knapformer_cli.profile import settings
from knapformer_cli.schema import Config, SlurmConfig
from knapformer_cli.slurm.commands import check_installed, slurm
from knapformer_cli.slurm.jobs import JOB, active_job
from knapformer_cli.slurm.script import Job, check_dependency, check_slurm, profile_script, training_script
from knapformer_cli.slurm.snapshot import take_snapshot

SCRIPT = "submit.slurm"


@dataclass(frozen=True)
class Request:
    """The options of the command line; None leaves the configuration as it is."""

    nodes: int | None = None
    gpus_per_node: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    container: str | None = None
    dependency: str | None = None
    array: str | None = None


def train_command(overrides: Sequence[str], request: Request, submit: bool, sweep: bool) -> None:
    """Write RUN/config.yaml, RUN/code and RUN/submit.slurm, of a sweep one for all; print or submit it."""
    if submit:
        check_installed("sbatch")
    if request.array is not None and not sweep:
        raise ValueError(f"--array is {request.array!r}, and its elements are runs of a sweep; add --sweep")
    choices = expand_sweep(overrides) if sweep else [list(overrides)]
    configs = [resolve(choice, request) for choice in choices]
    _check_alike(configs)
    run, array = Path(configs[0].run.dir), _array(request.array, len(configs)) if sweep else None
    for element, config in enumerate(configs if sweep else []):
        config.run.dir = str(run / f"{element:02d}")
        config.logging.group = config.logging.group or run.name
    for config in configs:
        check_settings(config)
        check_data(config)
    if request.dependency is None:
        _check_idle(run)
    with _whole_or_not_at_all(run):
        for config in configs:
            let_go_of_run_folder(write_run_folder(config).parent)  # the job holds it from its start on
        script = _write(run, training_script, _job(run, configs[0], request, array))
        number = _sbatch(script) if submit else None
    for element, config in enumerate(configs if number else []):
        (Path(config.run.dir) / JOB).write_text(f"{number}_{element}\n" if sweep else f"{number}\n")
    _tell(run, script, number)


def profile_command(overrides: Sequence[str], request: Request, submit: bool) -> None:
    """Write a job that calibrates on one device and profiles the settings; print or submit it."""
    if submit:
        check_installed("sbatch")
    config = compose(overrides)
    _ask(config.slurm, request)
    check_lengths(config)
    settings.checked_mix(settings.resolve(overrides)[0], overrides)
    run = Path(os.path.abspath(config.run.dir))
    _check_idle(run)
    with _whole_or_not_at_all(run):
        script = _write(run, profile_script, replace(_job(run, config, request), settings=tuple(overrides)))
        number = _sbatch(script) if submit else None
    if number is not None:
        (run / JOB).write_text(f"{number}\n")
    _tell(run, script, number)


def _sbatch(script: Path) -> str:
    return slurm("sbatch", "--parsable", str(script)).strip().split(";")[0]


def _tell(run: Path, script: Path, number: str | None) -> None:
    if number is None:
        print(script.read_text(), end="")
        print(f"# written, not submitted: sbatch {script}")
    else:
        print(f"submitted job {number}: {run}")
        print(f"watch it with: knapformer slurm status {run}")


def _ask(ask: SlurmConfig, request: Request) -> None:
    """The options of the command line over the settings; ValueError for what no script can ask."""
    for name in ("gpus_per_node", "time", "partition", "account", "qos", "constraint", "container"):
        if (value := getattr(request, name)) is not None:
            setattr(ask, name, value)
    check_slurm(ask)
    check_dependency(request.dependency)


def resolve(overrides: Sequence[str], request: Request) -> Config:
    """The configuration for the nodes of the request, whatever this machine has; run.dir is absolute."""
    config = compose(overrides)
    _ask(config.slurm, request)
    launch, gpus = config.launch, config.slurm.gpus_per_node
    if request.nodes is not None:
        launch.nodes = request.nodes
    if launch.nodes < 1:
        raise ValueError(f"--nodes is {launch.nodes}; it must be at least 1")
    if launch.port:
        raise ValueError(
            f"launch.port is {launch.port}, and a job of Slurm takes its port from its number; leave it 0"
        )
    device = "cuda" if gpus else "cpu"
    if launch.device not in ("auto", device):
        raise ValueError(
            f"launch.device is {launch.device}, and slurm.gpus_per_node is {gpus}, which means {device}"
        )
    if gpus and launch.ranks not in (None, gpus):
        raise ValueError(
            f"launch.ranks is {launch.ranks}, and slurm.gpus_per_node is {gpus}; a GPU holds one rank"
        )
    launch.device, launch.ranks = device, gpus or launch.ranks or 2
    config.run.dir = os.path.abspath(config.run.dir)
    return config


def _job(run: Path, config: Config, request: Request, array: str | None = None) -> Job:
    ask = config.slurm
    return Job(
        name=re.sub(r"\s+", "-", config.run.name),
        run=run,
        code=run / "code",
        work=Path.cwd(),
        python=ask.python or ("python" if ask.container else sys.executable),
        nodes=config.launch.nodes,
        ask=ask,
        array=array,
        dependency=request.dependency,
    )


def _write(run: Path, render: Callable[[Job], str], job: Job) -> Path:
    """The run's logs, code and script; the script names the snapshot."""
    (run / "logs").mkdir(parents=True, exist_ok=True)
    script = run / SCRIPT
    script.write_text(render(replace(job, code=take_snapshot(job.code))))
    script.chmod(0o755)
    return script


def _check_alike(configs: Sequence[Config]) -> None:
    """An array asks Slurm once for all its elements."""
    for config in configs:
        if (config.slurm, config.launch.nodes) != (configs[0].slurm, configs[0].launch.nodes):
            raise ValueError(
                "a sweep over slurm.* or launch.nodes is no job array; submit a job for each value"
            )


def _array(given: str | None, count: int) -> str:
    if given is None:
        return f"0-{count - 1}"
    elements = given.partition("%")[0]
    if not re.fullmatch(r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?", given):
        raise ValueError(f"--array is {given!r}; write elements as 0-7, 0,3 or 0-7%2, two of them at once")
    if max(int(number) for number in re.findall(r"\d+", re.sub(r":\d+", "", elements))) >= count:
        raise ValueError(f"--array is {given!r}, and the sweep has elements 0 to {count - 1}")
    return given


def _check_idle(run: Path) -> None:
    """Two jobs would write into one folder; one that depends on the other may be submitted all the same."""
    if job := active_job(run):
        raise ValueError(
            f"run.dir {run} has job {job.number}, which is {job.state}; cancel it with `knapformer slurm "
            f"cancel {run}`, or let this one wait for it with --dependency afterany:{job.number}"
        )


@contextmanager
def _whole_or_not_at_all(run: Path) -> Iterator[None]:
    """Remove what was written when the job does not come about; a folder that was there before stays."""
    existed = run.exists()
    try:
        yield
    except (OSError, ValueError) as error:
        if not existed:
            shutil.rmtree(run, ignore_errors=True)
        if isinstance(error, OSError):
            raise ValueError(f"run.dir {run} cannot be written: {error.strerror}") from error
        raise
