"""From overrides to a running job; what a user can get wrong is checked here, before any rank starts."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from data.config import DataConfig, check_config
from data.loader import Loader
from data.manifest import Manifest, open_manifest
from knapformer import check_layout, choose_kernel
from knapformer_cli.config import check_same_run, compose, expand_sweep, to_yaml
from knapformer_cli.cost import resolve_for_machine
from knapformer_cli.folder import HELD, write_run_folder
from knapformer_cli.ports import check_port, free_port
from knapformer_cli.schema import Config, LaunchConfig
from knapformer_cli.training.checkpoint import complete_checkpoints, find_checkpoint, read_progress
from knapformer_cli.training.preempt import read_marker
from knapformer_cli.worker import run_worker
from models.config import check_model


def in_torchrun() -> bool:
    """True in a process that torchrun (or a Slurm script like it) started as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ and "MASTER_ADDR" in os.environ


def train_as_rank(overrides: Sequence[str]) -> None:
    """The worker of a bare torchrun: rank 0 composes, checks, writes the run folder and tells the others."""

    def make(ranks: int) -> Config:
        config = compose(overrides)
        here = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if config.launch.ranks not in (None, here):
            raise ValueError(
                f"launch.ranks is {config.launch.ranks}, but torchrun started {here} ranks; leave it unset"
            )
        choose_device(config.launch)
        resolve_for_machine(config)
        config.launch.ranks, config.launch.nodes = here, ranks // here
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
        code = start(config)
        if code or read_marker(Path(config.run.dir)):  # what ends one run early is meant for all
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
    resolve_for_machine(config)
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
    check_layout(b.layout, ranks=config.launch.job_ranks, heads=config.model.heads, domain=b.domain)
    for key, (height, width) in (("pictures", s.pictures), ("clips", s.clips[1:])):
        if height % c.patch or width % c.patch:
            raise ValueError(
                f"sampling.{key} of {height}x{width} pixels are no multiples of data.patch={c.patch}"
            )
    for prompt in (*s.prompts, *s.clip_prompts):
        if len(prompt.encode()) > c.max_text:
            raise ValueError(
                f"the sample prompt {prompt[:30]!r}... has {len(prompt.encode())} bytes; captions have at "
                f"most data.max_text={c.max_text}"
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
    ranks = config.launch.job_ranks
    Loader(config.data, manifest, batch_tokens=t.batch_tokens, rank=0, ranks=ranks, seed=t.seed, state=state)


def index_data(config: DataConfig) -> Manifest:
    """The manifest of the shards, with a bar while new ones are fetched and indexed."""
    if config.demo and not Path(config.demo).exists():
        from data.demo import make_demo  # scikit-learn, where its digits are; no rank needs a second for it

        Console(stderr=True).print(f"making the demo set in {config.demo}", highlight=False)
        make_demo(Path(config.demo))
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("indexing shards", total=None)
        return open_manifest(
            config, progress=lambda done, total: bar.update(task, completed=done, total=total)
        )


def start(config: Config) -> int:
    """Run the job on this machine; returns the exit code."""
    from knapformer_cli.node import Node, run_node

    if config.launch.nodes > 1:
        raise ValueError(
            f"launch.nodes is {config.launch.nodes}, and this command starts one machine; use knapformer "
            "slurm train, or torchrun on each of them"
        )
    path, launch = write_run_folder(config), config.launch
    os.environ[HELD] = str(path.parent.resolve())
    head = f"127.0.0.1:{launch.port or free_port()}"
    node = Node(head, id=path.parent.name, restarts=launch.restarts, address="127.0.0.1")
    return run_node(path, launch.ranks or 1, config.parallel.threads, node)
