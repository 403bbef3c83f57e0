"""Run functions on real gloo processes, one spawn for many laws (a spawn costs seconds)."""

import os
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(laws: Sequence[Callable[..., None]], ranks: int, *args: object) -> None:
    """Call every law(group, *args) in each of `ranks` gloo processes; what one asserts fails the caller.

    The laws must be module-level functions (they are pickled by name); `args` must be picklable.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.start_processes(_enter, args=(ranks, store, tuple(laws), args), nprocs=ranks, start_method="spawn")


def _enter(rank: int, ranks: int, store: str, laws: tuple[Callable[..., None], ...], args: tuple) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    try:
        for law in laws:
            law(dist.group.WORLD, *args)
            dist.barrier()
    finally:
        dist.destroy_process_group()
