"""One rank of a job: `python -m knapformer_cli.worker RUN/config.yaml`, or the CLI under a bare torchrun.

USR1 and TERM ask it to save and end with exit code 0 (training/preempt.py); INT ends it at once. What fails
leaves RUN/failures/rank-....json (failures.py) and exit code 1, or 2 for what a user can mend.
"""

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from knapformer_cli.config import from_yaml, load_config, to_yaml
from knapformer_cli.failures import (
    FAILED,
    USER_ERROR,
    Failure,
    clear_failures,
    host,
    path_of,
    read_failure,
    read_failures,
    write_failure,
)
from knapformer_cli.folder import HELD, hold_run_folder
from knapformer_cli.schema import Config
from knapformer_cli.training import preempt
from knapformer_cli.training.phase import here

INDEX_SECONDS = 24 * 3600  # that nodes may take to fetch and index their shards
DEBUG = "KNAPFORMER_DEBUG"


def run_worker(config_on_rank_0: Callable[[int], Config]) -> None:
    """Train as the rank that torchrun's environment describes; rank 0 makes the configuration for all.

    A ValueError ends the rank with one sentence and exit code 2; rank 0 speaks for errors that all share.
    """
    _follow_launcher()
    preempt.listen()  # before the imports, which take seconds
    import torch.distributed as dist

    from knapformer_cli.training.parallel import SharedError, distributed_world
    from knapformer_cli.training.preflight import preflight
    from knapformer_cli.training.trainer import train
    from knapformer_cli.training.watch import watching

    store, rank, ranks = next(dist.rendezvous("env://"))
    folder: Path | None = None
    try:
        config = _share(store, rank, lambda: config_on_rank_0(ranks))
        folder, launch = Path(config.run.dir), config.launch
        _index_on_every_node(config, store, rank, ranks)
        with (
            distributed_world(launch, config.parallel.threads, store, rank, ranks) as world,
            watching(folder, rank, world.hosts, launch.timeout),
        ):
            if launch.preflight or (launch.preflight is None and len(set(world.hosts)) > 1):
                said = preflight(config, world)
                if rank == 0:
                    print(said, file=sys.stderr, flush=True)
            train(config, world)
    except (ValueError, OSError) as error:  # OSError: a disk that is full or gone
        if os.environ.get(DEBUG):
            traceback.print_exc()
        elif rank == 0 or not isinstance(error, SharedError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        if folder is not None:
            write_failure(folder, Failure(rank, host(), here().step, str(error), USER_ERROR))
        if rank != 0 and isinstance(error, SharedError):
            time.sleep(1)  # the launcher ends the other ranks when one is gone: let rank 0 speak first
        os._exit(USER_ERROR)  # threads and process groups may wait for ranks that are gone
    except Exception as error:
        _tell(error, folder, rank)
        os._exit(FAILED)


def _share(store, rank: int, make: Callable[[], Config]) -> Config:
    """Rank 0's configuration on every rank, or its error; the process group needs it, so comes later."""
    from knapformer_cli.training.parallel import SharedError

    if rank == 0:
        try:
            config = make()
            _begin(Path(config.run.dir))
        except (ValueError, OSError) as error:
            store.set("knapformer", f"error:{error}")
            raise
        store.set("knapformer", f"config:{to_yaml(config)}")
    kind, _, text = store.get("knapformer").decode().partition(":")
    if kind == "error":
        raise SharedError(text)
    return from_yaml(text)


def _index_on_every_node(config: Config, store, rank: int, ranks: int) -> None:
    """Fetch and index the shards once on each node, before a collective with its timeout waits for that.

    What is wrong with them is said later, by all ranks. A launcher on this machine has done it already.
    """
    from data.manifest import open_manifest

    if HELD in os.environ:
        logging.getLogger("data.manifest").setLevel(logging.ERROR)  # it has told what is lost
        return
    node, nodes = (
        int(os.environ.get(name, own)) for name, own in (("GROUP_RANK", rank), ("GROUP_WORLD_SIZE", ranks))
    )
    if os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(ValueError, OSError):
            open_manifest(config.data)
        store.set(f"indexed {node}", "")
    logging.getLogger("data.manifest").setLevel(logging.ERROR)  # told once a node
    store.wait([f"indexed {node}" for node in range(nodes)], timedelta(seconds=INDEX_SECONDS))


def _begin(folder: Path) -> None:
    """On rank 0, before any other rank may fail: the records of the attempt before go.

    Raises ValueError again when that attempt ended with a user's error, which no restart mends.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    before = read_failures(folder)
    if restarts and before:
        if before[0].code == USER_ERROR:
            raise ValueError(before[0].error)
        silent = set(range(int(os.environ["WORLD_SIZE"]))) - {failure.rank for failure in before}
        reason = before[0].in_words()
        if before[0].collateral and silent:  # what it met says little: somebody was killed
            who = ", ".join(map(str, sorted(silent)[:8]))
            reason = f"rank {who} ended without a word, as rank {before[0].rank} on {before[0].host} noticed"
        print(f"restart {restarts}: {reason}", file=sys.stderr, flush=True)
    clear_failures(folder)


def _tell(error: Exception, folder: Path | None, rank: int) -> None:
    """Leave the reason where every node can read it, and say it; whoever only lost another rank is brief."""
    if folder is None:
        traceback.print_exception(error)
        return
    if watched := read_failure(path_of(folder, rank)):  # the watch knows whom all wait for
        print(f"rank {rank} gives up: {watched.in_words()}", file=sys.stderr, flush=True)
        return
    said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    lines = traceback.format_tb(error.__traceback__)[-1].splitlines()
    failure = Failure(rank, host(), here().step, said, FAILED, tuple(lines))
    write_failure(folder, failure)
    if failure.collateral and not os.environ.get(DEBUG):
        print(f"rank {rank} lost another rank{failure.at}: {said}", file=sys.stderr, flush=True)
    else:
        traceback.print_exception(error)


def _follow_launcher() -> None:
    """End at once when the launcher passes Ctrl-C on, and with it even when it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no KeyboardInterrupt that waits for a collective to return
    if sys.platform == "linux":
        parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        # KILL, not TERM: the folder is free once its launcher is gone, so nobody may still save into it.
        ctypes.CDLL(None).prctl(parent_death_signal, signal.SIGKILL)


def _load(path: Path) -> Config:
    """On rank 0: the configuration of the run folder, held for this job."""
    config = load_config(path)
    hold_run_folder(Path(config.run.dir))
    return config


if __name__ == "__main__":
    run_worker(lambda ranks: _load(Path(sys.argv[1])))
