"""One rank of a job: `python -m knapformer_cli.worker RUN/config.yaml`, or the CLI under a bare torchrun."""

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from knapformer_cli.config import from_yaml, load_config, to_yaml
from knapformer_cli.schema import Config

USER_ERROR = 2
DEBUG = "KNAPFORMER_DEBUG"


def run_worker(config_on_rank_0: Callable[[int], Config]) -> None:
    """Train as the rank that torchrun's environment describes; rank 0 makes the configuration for all.

    A ValueError ends the rank with one sentence and exit code 2; rank 0 speaks for errors that all share.
    """
    import torch.distributed as dist

    from knapformer_cli.training.parallel import SharedError, distributed_world
    from knapformer_cli.training.trainer import train

    _follow_launcher()
    store, rank, ranks = next(dist.rendezvous("env://"))
    try:
        config = _share(store, rank, lambda: config_on_rank_0(ranks))
        with distributed_world(config.launch, config.parallel.threads, store, rank, ranks) as world:
            train(config, world)
    except (ValueError, OSError) as error:  # OSError: a disk that is full or gone
        if os.environ.get(DEBUG):
            traceback.print_exc()
        elif rank == 0 or not isinstance(error, SharedError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        if rank != 0 and isinstance(error, SharedError):
            time.sleep(1)  # the launcher ends the other ranks when one is gone: let rank 0 speak first
        os._exit(USER_ERROR)  # threads and process groups may wait for ranks that are gone


def _share(store, rank: int, make: Callable[[], Config]) -> Config:
    """Rank 0's configuration on every rank, or its error; the process group needs it, so comes later."""
    from knapformer_cli.training.parallel import SharedError

    if rank == 0:
        try:
            config = make()
        except ValueError as error:
            store.set("knapformer", f"error:{error}")
            raise
        store.set("knapformer", f"config:{to_yaml(config)}")
    kind, _, text = store.get("knapformer").decode().partition(":")
    if kind == "error":
        raise SharedError(text)
    return from_yaml(text)


def _follow_launcher() -> None:
    """End at once when the launcher passes Ctrl-C on, and with it even when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt that waits for a collective to return
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGTERM)


if __name__ == "__main__":
    run_worker(lambda ranks: load_config(Path(sys.argv[1])))
