"""Before the first step, on all ranks at once: is this one job on equal, idle, well connected machines?

Each rank states facts about itself, all ranks read all of them, and so all find the same fault (or none).
"""

import hashlib
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from knapformer_cli.bandwidth import Bandwidth, measure
from knapformer_cli.checks import (
    SKEW_SECONDS,
    SLOW_SHARE,
    busy_gpus,
    listed_shards,
    python_and_torch,
    unreachable,
    write_error,
)
from knapformer_cli.schema import ClusterConfig, Config
from knapformer_cli.training.pace import Pace
from knapformer_cli.training.parallel import SharedError, World

PIECES = 20  # of work, by which the slowest node is found


@dataclass(frozen=True)
class Facts:
    """What a rank states: `alike` must be equal on all ranks, `faults` are its own; clock in seconds."""

    alike: dict[str, str]
    faults: tuple[str, ...]
    clock: float
    pace: float  # seconds of a piece of work


def preflight(config: Config, world: World) -> str:
    """One line about the machines of the job (collective); SharedError for what must be mended."""
    alike, faults = _alike(Path(config.run.dir), world.device), tuple(_faults(config, world))
    pace = _pace(world.device)
    dist.barrier(group=world.cpu_group)  # so that clocks are read at one moment
    facts: list[Any] = [None] * world.ranks
    dist.all_gather_object(facts, Facts(alike, faults, time.time(), pace), group=world.cpu_group)
    if fault := find_fault(facts, world.hosts):
        raise SharedError(fault)
    speed = measure(world.group, world.device)
    if world.device.type == "cuda" and (fault := find_slow(speed, config.cluster, world.hosts)):
        raise SharedError(fault)
    return in_words(facts, world.hosts, speed)


def find_fault(facts: list[Facts], hosts: tuple[str, ...]) -> str | None:
    """The first fault in a sentence that names rank and node."""
    for rank, fact in enumerate(facts):
        for fault in fact.faults:
            return f"rank {rank} on {hosts[rank]}: {fault}"
    for name, ours in facts[0].alike.items():
        for rank, fact in enumerate(facts):
            if fact.alike[name] != ours:
                return (
                    f"{name} differs: {fact.alike[name]} on {hosts[rank]} (rank {rank}), "
                    f"{ours} on {hosts[0]} (rank 0)"
                )
    clock_R = np.array([fact.clock for fact in facts])
    skew_R = np.abs(clock_R - np.median(clock_R))
    if skew_R.max() > SKEW_SECONDS:
        rank = int(skew_R.argmax())
        return (
            f"the clock of {hosts[rank]} (rank {rank}) is {skew_R[rank]:.0f} s from the others; "
            f"at most {SKEW_SECONDS:g} s are allowed"
        )
    return None


def find_slow(speed: Bandwidth, cluster: ClusterConfig, hosts: tuple[str, ...]) -> str | None:
    """A sentence when the ranks talk much slower than the cluster is said to."""
    across = len(set(hosts)) > 1
    key = "cluster.bandwidth_across" if across else "cluster.bandwidth"
    expected = cluster.bandwidth_across if across else cluster.bandwidth
    slowest = min(speed.all_reduce, speed.all_to_all)
    if slowest >= SLOW_SHARE * expected:
        return None
    return (
        f"all-reduce reaches {speed.all_reduce:.1f} and all-to-all {speed.all_to_all:.1f} GB/s a rank, less "
        f"than {SLOW_SHARE:.0%} of {key}={expected:g}; correct it or the network (NCCL_DEBUG=INFO says more)"
    )


def in_words(facts: list[Facts], hosts: tuple[str, ...], speed: Bandwidth) -> str:
    pace_R = np.array([fact.pace for fact in facts])
    slowest = int(pace_R.argmax())
    clock_R = np.array([fact.clock for fact in facts])
    return (
        f"preflight: {len(hosts)} ranks on {len(set(hosts))} node(s); all-reduce {speed.all_reduce:.1f}, "
        f"all-to-all {speed.all_to_all:.1f} GB/s a rank; clocks within {np.ptp(clock_R):.1f} s; slowest "
        f"{hosts[slowest]} (rank {slowest}), {pace_R[slowest] / np.median(pace_R):.1f} times the median"
    )


def _alike(folder: Path, device: torch.device) -> dict[str, str]:
    """What must be the same everywhere: versions, code, configuration, kind of device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    config = folder / "config.yaml"
    return {
        "the version of python or torch": python_and_torch().found,
        "the code": _digest(Path(__file__).parent.parent.parent),
        "RUN/config.yaml": _hash(config.read_bytes()) if config.is_file() else "none",
        "the device": name,
    }


def _digest(root: Path) -> str:
    """Of the source files of this distribution."""
    packages = ("knapformer", "knapformer_cli", "models", "data")
    files = sorted(path for package in packages for path in (root / package).rglob("*.py"))
    return _hash(b"".join(path.relative_to(root).as_posix().encode() + path.read_bytes() for path in files))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _faults(config: Config, world: World) -> list[str]:
    """What this rank cannot do; of the ranks of a node the first one looks at the disks."""
    own = [world.device.index or 0] if world.device.type == "cuda" else []
    faults = [f"GPU {gpu} is in use by another process" for gpu in busy_gpus(own)]
    if world.hosts.index(world.hosts[world.rank]) == world.rank:
        if error := write_error(Path(config.run.dir)):
            faults.append(f"run.dir {config.run.dir} cannot be written: {error}")
        missing = (url for url in listed_shards(config) if unreachable(url))
        faults += [f"the shard {url} cannot be reached" for url in islice(missing, 1)]
    return faults


def _pace(device: torch.device) -> float:
    pace = Pace(device)
    for _ in range(PIECES):
        pace.work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    pieces, nanoseconds = pace.total
    return nanoseconds / max(1, pieces) / 1e9
