"""What a machine must have for a run, check by check: what was found, and how to mend what is wrong."""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.requirements import Requirement

from data.remote import is_remote
from data.shards import cache_folder, list_shards
from knapformer.kernels import available
from knapformer_cli.bandwidth import loopback
from knapformer_cli.ports import check_port, free_port
from knapformer_cli.schema import Config
from models.denoiser import build_denoiser

SKEW_SECONDS = 5.0  # that clocks may differ
BUSY_SHARE = 0.1  # of a GPU's memory in use makes it a busy one
SLOW_SHARE = 0.25  # of the expected bandwidth is too little
STATE_BYTES = 16  # of a parameter in a checkpoint: weights, their average and Adam's two moments, float32


@dataclass(frozen=True)
class Check:
    """`fix` says what to do; it is empty where all is well. `note` is worth knowing and no fault."""

    name: str
    found: str
    fix: str = ""
    note: str = ""


def all_checks(config: Config) -> Iterator[Check]:
    """Every check of this machine for the run that the configuration describes, quick ones first."""
    gpus = torch.cuda.device_count() if config.launch.device != "cpu" else 0
    folder, cache = Path(config.run.dir), cache_folder(config.data)
    yield python_and_torch()
    yield packages()
    yield gpus_visible(config.launch.device)
    yield gpus_idle(gpus)
    yield kernels("cuda" if gpus else "cpu")
    yield disk("run folder", folder, checkpoint_bytes(config) * (max(config.checkpoint.keep, 1) + 1))
    yield disk("cache", cache, 2**30)
    yield clock(folder)
    yield shards(config)
    yield shared_memory(gpus)
    yield open_files(config.launch.job_ranks)
    yield host_name()
    yield port(config.launch.port)
    yield slurm()
    yield talk(gpus, config.cluster.bandwidth)


def python_and_torch() -> Check:
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return Check("python", f"python {platform.python_version()}, torch {torch.__version__} ({built})")


def packages() -> Check:
    """The versions that this distribution asks for."""
    wrong, wanted = [], [Requirement(text) for text in importlib.metadata.requires("knapformer") or []]
    wanted = [need for need in wanted if need.marker is None or need.marker.evaluate()]
    for need in wanted:
        try:
            version = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            version = None
        if version is None or not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need.name} {version or 'missing'}")
    fix = "pip install " + " ".join(f"'{need}'" for need in wanted) if wrong else ""
    return Check("packages", ", ".join(wrong) or f"all {len(wanted)} as required", fix)


def gpus_visible(wanted: str) -> Check:
    """GPUs that torch sees, against those of the driver."""
    seen, listed = torch.cuda.device_count(), _run("nvidia-smi", "-L")
    there = len(listed.splitlines()) if listed else 0
    if seen:
        driver = (
            _run("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "?"
        ).splitlines()[0]
        return Check("gpus", f"{seen} of {torch.cuda.get_device_name(0)}, driver {driver}")
    if there:
        fix = "update the driver or install the torch of its CUDA version; look at CUDA_VISIBLE_DEVICES"
        return Check("gpus", f"torch sees none of {there}", fix)
    fix = "run on a machine with GPUs, or with launch.device=cpu" if wanted == "cuda" else ""
    return Check("gpus", "none", fix, note="ranks run on the CPU")


def gpus_idle(gpus: int) -> Check:
    busy = busy_gpus(range(gpus))
    fix = f"end what nvidia-smi shows on GPU {', '.join(map(str, busy))}, or leave it out" if busy else ""
    return Check("gpus idle", f"{len(busy)} of {gpus} in use" if gpus else "no GPU", fix)


def busy_gpus(gpus: Iterable[int]) -> list[int]:
    """Those GPUs whose memory others use; looking takes some memory of each, until this process ends."""
    found = []
    for gpu in gpus:
        free, total = torch.cuda.mem_get_info(gpu)
        if total - free - torch.cuda.memory_reserved(gpu) > BUSY_SHARE * total:
            found.append(gpu)
    return found


def kernels(device: str) -> Check:
    names = available(device)
    note = "" if device == "cpu" or len(names) > 1 else "flash attention is faster: pip install flash-attn"
    return Check("attention", ", ".join(names), note=note)


def checkpoint_bytes(config: Config) -> int:
    with torch.device("meta"):
        model = build_denoiser(config.model, config.data.channels)
    return STATE_BYTES * sum(p.numel() for p in model.parameters())


def disk(name: str, folder: Path, needed: int) -> Check:
    """Whether files can be written where `folder` is or will be, and `needed` bytes are free."""
    if error := write_error(folder):
        return Check(name, f"{folder}: {error}", f"choose a folder that you may write; {folder} is none")
    free = shutil.disk_usage(_existing(folder)).free
    fix = f"free {(needed - free) / 2**30:.1f} GiB there, or choose another folder" if free < needed else ""
    return Check(name, f"{folder}: {free / 2**30:.1f} GiB free, {needed / 2**30:.1f} needed", fix)


def write_error(folder: Path) -> str | None:
    """Why nothing can be written into a folder, or into the nearest one above it that exists."""
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".knapformer-") as file:
            file.write(b"0" * 2**16)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return None


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def clock(folder: Path) -> Check:
    """This machine's clock against the one that stamps files in the run folder."""
    try:
        with tempfile.NamedTemporaryFile(dir=_existing(folder), prefix=".knapformer-") as file:
            skew = os.stat(file.name).st_mtime - time.time()
    except OSError:
        return Check("clock", "not compared: nothing can be written")
    fix = "synchronise the clock, for example with chrony" if abs(skew) > SKEW_SECONDS else ""
    return Check("clock", f"{abs(skew):.1f} s from the file server's", fix)


def shards(config: Config) -> Check:
    """The shards of every source: files are looked for, of remote ones only the name is resolved."""
    if config.data.codes:
        fix = "data.codes names lengths without pixels; training needs data.sources"
        return Check("shards", f"none, data.codes={config.data.codes}", fix)
    if config.data.demo and not Path(config.data.demo).exists():
        return Check("shards", f"the demo set is made in {config.data.demo} when a run starts")
    urls = listed_shards(config)
    missing = [url for url in urls if unreachable(url)]
    fix = f"mount or copy {missing[0]}" if missing else ""
    found = f"{len(missing)} of {len(urls)} cannot be reached" if missing else f"{len(urls)} there"
    return Check("shards", found, fix)


def listed_shards(config: Config) -> list[str]:
    """Paths and URLs of all sources that are drawn from."""
    drawn = {name: source for name, source in config.data.sources.items() if source.weight > 0}
    return [url for name, source in drawn.items() for url in list_shards(name, source.shards)]


def unreachable(url: str) -> bool:
    if not is_remote(url):
        return not os.access(url, os.R_OK)
    host = url.split("://", 1)[-1].split("/", 1)[0].rpartition("@")[2].split(":")[0]
    if not url.startswith("http"):
        return False  # a pipe or a bucket: only reading it would tell
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return True
    return False


def shared_memory(gpus: int) -> Check:
    path = Path("/dev/shm")
    if not path.exists():
        return Check("/dev/shm", "absent", "start the container with --ipc=host" if gpus else "")
    size, needed = shutil.disk_usage(path).total, gpus * 2**28  # NCCL's rings and the decoded samples
    fix = f"start the container with --shm-size={max(1, gpus)}g or --ipc=host" if size < needed else ""
    return Check("/dev/shm", f"{size / 2**30:.1f} GiB", fix)


def open_files(ranks: int) -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 1024 + 8 * ranks  # a rank holds connections to all others, for several groups
    fix = f"ulimit -n {max(needed, 65536)}" if soft != resource.RLIM_INFINITY and soft < needed else ""
    return Check("open files", f"limit {soft} (hard {hard}), {needed} needed", fix)


def host_name() -> Check:
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None)[0][4][0]
    except OSError as error:
        fix = f"add {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        return Check("host name", f"{name} does not resolve: {error.strerror}", fix)
    return Check("host name", f"{name} is {address}")


def port(wanted: int) -> Check:
    try:
        if wanted:
            check_port(wanted)
        return Check("port", f"{wanted or free_port()} is free")
    except (OSError, ValueError) as error:
        return Check("port", str(error), "choose another launch.port, or 0 for any free one")


def slurm() -> Check:
    if shutil.which("sbatch") is None:
        return Check(
            "slurm", "not installed", note="`knapformer slurm` needs it, `knapformer train` does not"
        )
    answer = _run("sinfo", "--noheader", "--format=%P %a %D")
    if answer is None:
        note = "slurmctld does not answer, or SLURM_CONF is wrong; only `knapformer slurm` needs it"
        return Check("slurm", "installed, sinfo fails", note=note)
    return Check("slurm", f"partitions {', '.join(answer.splitlines())}")


def talk(gpus: int, expected: float) -> Check:
    """All-reduce and all-to-all between two processes, or all GPUs, of this machine."""
    ranks = gpus or 2
    if gpus == 1:
        return Check("ranks talk", "one GPU talks to nobody")
    try:
        found = loopback("cuda" if gpus else "cpu", ranks)
    except Exception as error:  # whatever torch's process group meets
        fix = "see `host name` and `open files`; on GPUs, NCCL_DEBUG=INFO says more"
        return Check("ranks talk", str(error).strip().splitlines()[-1][:120], fix)
    slowest = min(found.all_reduce, found.all_to_all)
    fix = ""
    if gpus and slowest < SLOW_SHARE * expected:
        fix = (
            f"expected {expected:g} GB/s (cluster.bandwidth): look at nvidia-smi topo -m and NCCL_P2P_DISABLE"
        )
    words = f"{ranks} ranks: all-reduce {found.all_reduce:.1f}, all-to-all {found.all_to_all:.1f} GB/s a rank"
    return Check("ranks talk", words, fix)


def _run(*words: str) -> str | None:
    """What a program prints, None when it is absent or fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
