"""Who failed first: each rank that fails leaves RUN/failures/rank-00003.json, so that any node can tell.

Rank 0 clears the folder when an attempt starts; by then every process of the attempt before is gone.
"""

import json
import os
import shutil
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

FAILED, USER_ERROR = 1, 2  # exit codes: the second is what a user can mend

# What ranks meet because another one is gone: true, but not the reason.
_COLLATERAL = (
    *("connection closed by peer", "connection reset", "connection refused", "broken pipe", "socket"),
    *("timed out", "nccl", "unable to complete", "connect error"),
)


@dataclass(frozen=True)
class Failure:
    """How one rank ended: its own words, or the end of its log when it had none."""

    rank: int
    host: str
    step: int | None  # optimizer steps done
    error: str
    code: int  # exit code, or minus the signal
    lines: tuple[str, ...] = ()
    time: float = field(default_factory=time.time)  # seconds since the epoch

    @property
    def collateral(self) -> bool:
        """Whether another rank's end may be the reason of this one."""
        words = self.error.lower()
        return self.code == 1 and any(part in words for part in _COLLATERAL)

    @property
    def at(self) -> str:
        return "" if self.step is None else f" at step {self.step}"

    def in_words(self) -> str:
        """One sentence and the last lines."""
        said = "".join(f"\n  {line}" for line in self.lines)
        return f"rank {self.rank} on {self.host} failed{self.at}: {self.error}{said}"


def write_failure(folder: Path, failure: Failure, by: int | None = None) -> None:
    """Leave the record, in the file of rank `by` where another one tells it.

    A folder that cannot be written is no second failure.
    """
    path = path_of(folder, failure.rank if by is None else by)
    try:
        path.parent.mkdir(exist_ok=True)
        fresh = path.with_name(f".{path.name}")
        fresh.write_text(json.dumps(asdict(failure), indent=1) + "\n")
        fresh.replace(path)
    except OSError:
        return


def path_of(folder: Path, rank: int) -> Path:
    return folder / "failures" / f"rank-{rank:05d}.json"


def read_failure(path: Path) -> Failure | None:
    try:
        record = json.loads(path.read_text())
        return Failure(**{**record, "lines": tuple(record["lines"])})
    except (OSError, ValueError, TypeError, KeyError):  # none, or replaced meanwhile
        return None


def read_failures(folder: Path) -> list[Failure]:
    """The records of this attempt, the first one first: reasons before what followed from them."""
    paths = (folder / "failures").glob("rank-*.json")
    found = [failure for path in paths if (failure := read_failure(path))]
    return sorted(found, key=lambda failure: (failure.collateral, failure.time))


def clear_failures(folder: Path) -> None:
    shutil.rmtree(folder / "failures", ignore_errors=True)


def host() -> str:
    """The name of this node: Slurm's where there is one, for several nodes may share a machine."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
