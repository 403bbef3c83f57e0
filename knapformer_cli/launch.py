"""From overrides to a running job; what a user can get wrong is checked here, before any rank starts."""

import fcntl
import logging
import os
import shlex
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import Progress

from data.config import DataConfig, check_config
from data.demo import make_demo
from data.loader import Loader
from data.manifest import Manifest, open_manifest
from knapformer import check_layout, choose_kernel
from knapformer_cli.config import check_same_run, compose, expand_sweep, to_yaml
from knapformer_cli.schema import Config, LaunchConfig
from knapformer_cli.training.checkpoint import complete_checkpoints, find_checkpoint, read_progress
from knapformer_cli.worker import USER_ERROR, run_worker
from models.config import check_model


def in_torchrun() -> bool:
    """True in a process that torchrun (or a Slurm script like it) started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def train_as_rank(overrides: Sequence[str]) -> None:
    """The worker of a bare torchrun: rank 0 composes, checks, writes the run folder and tells the others."""

    def make(ranks: int) -> Config:
        config = compose(overrides)
        if config.launch.ranks not in (None, ranks):
            raise ValueError(
                f"launch.ranks is {config.launch.ranks}, but torchrun started {ranks} ranks; leave it unset"
            )
        choose_device(config.launch)
        config.launch.ranks = ranks
        check_settings(config)
        check_data(config)
        write_run_folder(config)
        return config

    run_worker(make)


def train_run(overrides: Sequence[str], dry_run: bool) -> None:
    """`knapformer train`: check, then run the job on this machine and exit with its code."""
    config = resolve(overrides)
    check_settings(config)
    if dry_run:
        print(to_yaml(config), end="")
        worker = f"{sys.executable} -m knapformer_cli.worker {config.run.dir}/config.yaml"
        print(f"# {config.launch.ranks} ranks of: {worker}")
        return
    check_data(config)
    sys.exit(start(config))


def train_sweep(overrides: Sequence[str], dry_run: bool) -> None:
    """`knapformer train --sweep`: one run after the other, each in a folder of its own below run.dir."""
    choices = expand_sweep(overrides)
    configs = [resolve(choice) for choice in choices]
    parent = Path(configs[0].run.dir)
    for number, (choice, config) in enumerate(zip(choices, configs, strict=True)):
        config.run.dir = str(parent / f"{number:02d}")
        config.logging.group = config.logging.group or parent.name
        check_settings(config)
        print(f"# run {number} of {len(configs)}: {shlex.join(choice)} -> {config.run.dir}")
    for config in [] if dry_run else configs:
        check_data(config)
        if code := start(config):
            sys.exit(code)


def resolve(overrides: Sequence[str]) -> Config:
    """The configuration with what this machine decides: device and number of ranks."""
    config = compose(overrides)
    gpus, launch = choose_device(config.launch), config.launch
    if launch.ranks is None:
        launch.ranks = gpus or 2
    if launch.device == "cuda" and launch.ranks > gpus:
        raise ValueError(
            f"launch.ranks is {launch.ranks}, and this machine has {gpus} GPUs; a GPU holds one rank"
        )
    return config


def choose_device(launch: LaunchConfig) -> int:
    """Settle launch.device and return its GPUs, 0 for the CPU; ValueError for cuda without a GPU."""
    import torch

    gpus = torch.cuda.device_count()
    if launch.device == "auto":
        launch.device = "cuda" if gpus else "cpu"
    if launch.device == "cuda" and not gpus:
        raise ValueError("launch.device is cuda, and this machine shows no GPU; use launch.device=cpu")
    return gpus if launch.device == "cuda" else 0


def check_settings(config: Config) -> None:
    """Raise ValueError for the first setting that cannot work on this many ranks; reads no data."""
    check_model(config.model)
    check_config(config.data)
    c, b, s = config.data, config.balancer, config.sampling
    if c.max_text > config.model.text.max_bytes:
        raise ValueError(
            f"data.max_text is {c.max_text}, and the model reads captions of at most "
            f"model.text.max_bytes={config.model.text.max_bytes}; lower the one or raise the other"
        )
    check_layout(b.layout, ranks=config.launch.ranks or 1, heads=config.model.heads, domain=b.domain)
    for key, (height, width) in (("pictures", s.pictures), ("clips", s.clips[1:])):
        if min(height, width) < c.patch:
            raise ValueError(
                f"sampling.{key} of {height}x{width} pixels has no patch of data.patch={c.patch}"
            )
    if config.launch.device == "cpu":
        choose_kernel(b.kernel, "cpu")
    if config.launch.port:
        check_port(config.launch.port)


def check_data(config: Config) -> None:
    """Raise ValueError for the first thing wrong with the run folder, its checkpoints or the data."""
    folder, t = Path(config.run.dir), config.training
    check_same_run(config, folder)
    found = find_checkpoint(config.checkpoint.resume, folder / "checkpoints")
    if found is not None:
        check_same_run(config, found)
    elif complete_checkpoints(folder / "checkpoints"):
        raise ValueError(f"{folder} holds checkpoints; checkpoint.resume=none needs a run.dir of its own")
    kept = complete_checkpoints(folder / "checkpoints")
    if found in kept[:-1]:
        raise ValueError(
            f"{found} is not the newest checkpoint of run.dir {folder}; go on from it in another run.dir"
        )
    state = read_progress(found).loader if found else None
    manifest = index_data(config.data)
    ranks = config.launch.ranks or 1
    Loader(config.data, manifest, batch_tokens=t.batch_tokens, rank=0, ranks=ranks, seed=t.seed, state=state)


def index_data(config: DataConfig) -> Manifest:
    """The manifest of the shards, with a bar while new ones are fetched and indexed."""
    if config.demo and not Path(config.demo).exists():
        Console(stderr=True).print(f"making the demo set in {config.demo}", highlight=False)
        make_demo(Path(config.demo))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("indexing shards", total=None)
        return open_manifest(
            config, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def write_run_folder(config: Config) -> Path:
    """Create RUN with its config.yaml; ValueError where that cannot be written, or another job is in it."""
    folder = Path(config.run.dir)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        hold_run_folder(folder)
        fresh = folder / ".config.yaml"
        fresh.write_text(to_yaml(config))
        fresh.replace(folder / "config.yaml")
    except OSError as error:
        raise ValueError(f"run.dir {folder} cannot be written: {error.strerror}") from error
    return folder / "config.yaml"


def hold_run_folder(folder: Path) -> None:
    """Keep other jobs out of RUN until this process ends; ValueError when one is in it."""
    lock = (folder / ".lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"run.dir {folder} is in use by another job; wait for it or choose another"
        ) from error
    except OSError:  # a file system without locks
        return
    _held.append(lock)


_held: list[TextIO] = []  # an open file is a held lock


def start(config: Config) -> int:
    """Run the job on this machine under torch.distributed.run's agent; returns the exit code."""
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    path, ranks = write_run_folder(config), config.launch.ranks or 1
    os.environ.update(PYTHONSAFEPATH="1", OMP_NUM_THREADS=str(config.parallel.threads))
    # What a decoding process held when it was ended goes with it; its tracker need not say so.
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"])
    )
    quiet = dict.fromkeys(range(1, ranks), Std.ALL)
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are told below, in words
    job = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=path.parent.name,
        rdzv_backend="static",
        rdzv_endpoint=f"127.0.0.1:{config.launch.port or _free_port()}",
        rdzv_configs={"rank": 0},
        max_restarts=0,
        monitor_interval=0.2,
        logs_specs=DefaultLogsSpecs(log_dir=str(path.parent / "logs"), redirects=quiet),
    )
    console = Console(stderr=True)
    try:
        elastic_launch(job, sys.executable)("-m", "knapformer_cli.worker", str(path))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == USER_ERROR and rank == 0:  # it has said why
            return USER_ERROR
        last = _last_lines(path.parent / "logs", rank)
        console.print(
            f"error: rank {rank} ended with {_exit(failure.exitcode)}{last}", markup=False, highlight=False
        )
        return USER_ERROR if failure.exitcode == USER_ERROR else 1
    except (SignalException, KeyboardInterrupt) as error:
        console.show_cursor()  # a progress bar that was killed hides it
        hint = _resume_hint(path.parent)
        console.print(f"interrupted; {hint}", markup=False, highlight=False, soft_wrap=True)
        return 128 + int(getattr(error, "sigval", 2))
    console.print(f"done: {path.parent}", highlight=False)
    return 0


def check_port(port: int) -> None:
    """Raise ValueError when something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"launch.port {port} cannot be used: {error.strerror}; choose another, or 0"
            ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _last_lines(logs: Path, rank: int, count: int = 5) -> str:
    """The end of what the newest attempt of a rank wrote to its log; rank 0 writes to the console instead."""
    found = sorted(logs.glob(f"*/attempt_*/{rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    lines = found[-1].read_text(errors="replace").splitlines()[-count:] if found else []
    return "".join(f"\n  {line}" for line in lines)


def _resume_hint(folder: Path) -> str:
    saved = complete_checkpoints(folder / "checkpoints")
    again = f"go on with run.dir={folder}" if saved else "nothing was saved yet"
    return f"last complete checkpoint: {saved[-1].name if saved else 'none'}; {again}"
