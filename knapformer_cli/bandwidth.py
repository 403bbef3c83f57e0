"""How fast the ranks of a group talk: GB/s that one rank sends, in all-reduces and all-to-alls."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

MEGABYTES = 8
LOOPBACK_SECONDS = 60  # that the ranks of a loopback may take


@dataclass(frozen=True)
class Bandwidth:
    """GB/s that a rank sends, counted as the algorithms need: 2(R-1)/R and (R-1)/R of the bytes."""

    all_reduce: float
    all_to_all: float


def measure(group: dist.ProcessGroup, device: torch.device, repeats: int = 3) -> Bandwidth:
    """The slowest rank's figures of the best of some repeats, the same on every rank (collective)."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return Bandwidth(float("inf"), float("inf"))
    count = MEGABYTES * 2**20 // 4 // ranks * ranks
    x, y = torch.ones(count, device=device), torch.empty(count, device=device)
    seconds = torch.tensor(
        [
            _best(lambda: dist.all_reduce(x, group=group), device, repeats),
            _best(lambda: dist.all_to_all_single(y, x, group=group), device, repeats),
        ],
        device=device,
    )
    dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
    sent = count * 4 * (ranks - 1) / ranks / 1e9
    reduce_seconds, exchange_seconds = seconds.tolist()
    return Bandwidth(2 * sent / reduce_seconds, sent / exchange_seconds)


def _best(collective: Callable[[], object], device: torch.device, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):  # the first one opens connections
        begin = time.perf_counter()
        collective()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def loopback(device: str, ranks: int) -> Bandwidth:
    """Measured between `ranks` new processes of this machine; raises what their group meets."""
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result")
        mp.start_processes(_talk, args=(ranks, device, folder, result), nprocs=ranks, start_method="spawn")
        all_reduce, all_to_all = torch.load(result)
    return Bandwidth(all_reduce, all_to_all)


def _talk(rank: int, ranks: int, device_type: str, folder: str, result: str) -> None:
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    dist.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=LOOPBACK_SECONDS),
    )
    assert dist.group.WORLD is not None
    found = measure(dist.group.WORLD, device)
    if rank == 0:
        torch.save((found.all_reduce, found.all_to_all), result)
    dist.destroy_process_group()
