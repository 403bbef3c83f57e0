"""One node of a job: starts its ranks, restarts them, passes signals on, says in one line how the job ended.

`knapformer train` is a job of one node. On several, run this once on each (srun does) for a run folder that
all of them share and whose config.yaml was checked before:

    python -m knapformer_cli.node RUN/config.yaml --nodes 2 --node-rank 0 --head n0:29500 --id JOB-0

RUN         written by `knapformer train --dry-run`'s composition or `knapformer slurm train`; launch.ranks
            there counts the ranks of ONE node, so the job has nodes x launch.ranks
--nodes     nodes of the job (default: launch.nodes)
--node-rank the head is 0; ranks are numbered by --address, node after node
--head      HOST:PORT where node 0 listens; the name must resolve everywhere
--id        the same on all nodes, another for every start of the job: job id and restart count of Slurm
--restarts  how often the ranks of all nodes start again after a failure (default: launch.restarts)
--address   name by which other nodes reach this one (default: its host name)

Exit codes: 0 finished, or preempted (then RUN/PREEMPTED exists); 1 failed; 2 a user's error;
128 + n ended by signal n. USR1 is passed on to the ranks, which save and end; after TERM torch's agent waits
30 seconds for the same. Start it with `trap '' USR1` where the signal may come in its first second.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING

from knapformer_cli.config import load_config
from knapformer_cli.failures import (
    FAILED,
    USER_ERROR,
    Failure,
    clear_failures,
    host,
    path_of,
    read_failures,
    write_failure,
)
from knapformer_cli.training.preempt import clear_marker, in_words, read_marker

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

JOIN_SECONDS = 600  # until all nodes of the job have come
LEAVE_SECONDS = 5  # that ranks have to end by themselves after one failed
REASON_SECONDS = 10  # that a node waits for the reason of a failure that another node caused


@dataclass(frozen=True)
class Node:
    """A node's place in its job."""

    head: str  # HOST:PORT
    nodes: int = 1
    rank: int = 0
    id: str = "knapformer"
    restarts: int = 0
    address: str | None = None


def run_node(config_path: Path, ranks: int, threads: int, node: Node) -> int:
    """Run `ranks` workers of the job here until all nodes are done; returns the exit code of the node."""
    from rich.console import Console
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError
    from torch.distributed.launcher.api import elastic_launch

    folder, console = config_path.parent, Console(stderr=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    _prepare_environment(threads)
    if node.rank == 0:  # what an earlier job left; no rank of this one runs before all nodes have met
        clear_marker(folder)
        clear_failures(folder)
    try:
        with _minding_ranks(folder):
            elastic_launch(_job(folder, ranks, node), sys.executable)(
                "-m", "knapformer_cli.worker", str(config_path)
            )
    except ChildFailedError as error:
        return _tell_failure(error, folder, node, say)
    except RendezvousError as error:
        if found := read_failures(folder):  # the head is gone, and has said why
            say(f"error: {found[0].in_words()}")
            return USER_ERROR if found[0].code == USER_ERROR else FAILED
        late = isinstance(error, RendezvousTimeoutError)
        why = f"some did not come within {JOIN_SECONDS} s" if late else _cause(error)
        say(f"error: the {node.nodes} nodes of the job did not meet at {node.head}: {why}")
        return FAILED
    except (SignalException, KeyboardInterrupt) as error:
        console.show_cursor()  # a progress bar that was killed hides it
        if marker := read_marker(folder):
            say(in_words(marker, folder))
            return 0
        say(f"interrupted; {_resume_hint(folder)}")
        return 128 + int(getattr(error, "sigval", 2))
    if node.rank == 0:
        marker = read_marker(folder)
        say(in_words(marker, folder) if marker else f"done: {folder}")
    return 0


def _prepare_environment(threads: int) -> None:
    os.environ.update(PYTHONSAFEPATH="1", OMP_NUM_THREADS=str(threads))
    # A store of its own for every attempt: torch else lends the agent's, with the keys of the attempt before.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    # What a decoding process held when it was ended goes with it; its tracker need not say so.
    os.environ["PYTHONWARNINGS"] = ",".join(
        filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"])
    )
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)  # failures are told here, in words


def _job(folder: Path, ranks: int, node: Node) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    return LaunchConfig(
        min_nodes=node.nodes,
        max_nodes=node.nodes,
        nproc_per_node=ranks,
        run_id=node.id,
        rdzv_backend="c10d",
        rdzv_endpoint=node.head,
        rdzv_configs={"is_host": str(node.rank == 0), "join_timeout": JOIN_SECONDS},
        max_restarts=node.restarts,
        monitor_interval=0.2,
        local_addr=node.address,
        logs_specs=DefaultLogsSpecs(
            log_dir=str(folder / "logs"), redirects=dict.fromkeys(range(1, ranks), Std.ALL)
        ),
    )


def check_head(head: str) -> None:
    """Raise ValueError when HOST:PORT does not name a machine that this one can find."""
    host, _, port = head.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--head is {head!r}; write HOST:PORT, with a port from 1 to 65535")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        raise ValueError(f"the head node {host!r} cannot be resolved: {error.strerror}") from error


@contextmanager
def _minding_ranks(folder: Path) -> Iterator[None]:
    """What torch's agent leaves open: USR1 for the ranks, and an end for those that outlive a failure.

    USR1 goes to ranks that start later too; it is blocked in them until they listen.
    """
    wanted, over = Event(), Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: wanted.set())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})

    def mind() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # this thread takes it for the process
        told: set[int] = set()
        before: set[int] = set()
        alone_since: dict[int, float] = {}
        while not over.wait(0.2):
            alive = _workers()
            for pid in alive - told if wanted.is_set() else ():
                _send(pid, signal.SIGUSR1)
                told.add(pid)
            if before - alive and read_failures(folder):  # one of them failed
                alone_since |= dict.fromkeys(alive, time.monotonic())
            before = alive
            for pid, since in alone_since.items():
                if pid in alive and time.monotonic() > since + LEAVE_SECONDS:
                    _send(pid, signal.SIGKILL)  # stopped, or in a collective that nobody else will join

    thread = Thread(target=mind, name="mind", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _workers() -> set[int]:
    """Process ids of the ranks that this process started."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"knapformer_cli.worker" in (stat.parent / "cmdline").read_bytes():
                found.add(int(stat.parent.name))
        except OSError:  # it ended meanwhile
            continue
    return found


def _tell_failure(error: "ChildFailedError", folder: Path, node: Node, say: Callable[[str], None]) -> int:
    """Say which rank of the job failed first, on any node, and return the exit code."""
    for rank, failure in error.failures.items():
        if not path_of(folder, rank).exists():  # it could not say so itself
            lines, code = _last_lines(folder / "logs", failure.local_rank), failure.exitcode
            write_failure(folder, Failure(rank, host(), None, _ending(code), code, tuple(lines)))
    wait_until = time.monotonic() + (REASON_SECONDS if node.nodes > 1 else 0)
    while (found := read_failures(folder)) and found[0].collateral and time.monotonic() < wait_until:
        time.sleep(0.5)  # another node may still find out why
    if not found:
        say(f"error: a rank failed, and {folder} cannot be written")
        return FAILED
    first = found[0]
    if not (first.code == USER_ERROR and first.rank == 0):  # then it has said why
        say(f"error: {first.in_words()}")
    return USER_ERROR if first.code == USER_ERROR else FAILED


def _ending(code: int) -> str:
    return (
        f"ended by signal {-code} ({signal.Signals(-code).name})"
        if code < 0
        else f"ended with exit code {code}"
    )


def _last_lines(logs: Path, local_rank: int, count: int = 5) -> list[str]:
    """The end of what the newest attempt of a rank wrote to its log; local rank 0 writes to the console."""
    found = sorted(logs.glob(f"*/attempt_*/{local_rank}/stderr.log"), key=lambda path: path.stat().st_mtime)
    return found[-1].read_text(errors="replace").splitlines()[-count:] if found else []


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0]


def _resume_hint(folder: Path) -> str:
    from knapformer_cli.training.checkpoint import complete_checkpoints

    saved = complete_checkpoints(folder / "checkpoints")
    again = f"go on with run.dir={folder}" if saved else "nothing was saved yet"
    return f"last complete checkpoint: {saved[-1].name if saved else 'none'}; {again}"


def main(words: Sequence[str] | None = None) -> int:
    """The command line of this module; a user's error is one sentence and exit code 2."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # it waits until there are ranks to tell
    parser = argparse.ArgumentParser(
        prog="python -m knapformer_cli.node", description=__doc__.splitlines()[0]
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--head", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--restarts", type=int)
    parser.add_argument("--address")
    given = parser.parse_args(words)
    try:
        config = load_config(given.config)
        nodes = config.launch.nodes if given.nodes is None else given.nodes
        restarts = config.launch.restarts if given.restarts is None else given.restarts
        if not 0 <= given.node_rank < nodes:
            raise ValueError(f"--node-rank is {given.node_rank}; it must lie in 0 to {nodes - 1}")
        if config.launch.ranks is None:
            raise ValueError(f"{given.config} leaves launch.ranks open; it must be the ranks of each node")
        check_head(given.head)
        node = Node(given.head, nodes, given.node_rank, given.id, restarts, given.address)
        return run_node(given.config, config.launch.ranks, config.parallel.threads, node)
    except (ValueError, OSError) as error:  # OSError: a disk that is full, gone or read-only
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
