"""Who keeps the others waiting: a thread of each rank that speaks up before a collective times out.

torch ends a collective after launch.timeout, in words that name no rank (gloo) or by an abort (NCCL). So when
a rank has not moved for most of that time, its watch writes where it stands, from its own stacks; a little
later it reads what the others wrote. Who wrote nothing, or does something else than wait, is the one.
"""

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType

from knapformer_cli.failures import Failure, path_of, write_failure
from knapformer_cli.training.phase import here

SPEAK, JUDGE = 0.7, 0.85  # shares of the timeout

Place = tuple[str, str, str, bool]  # part of a file's path, function or "", name, whether ranks wait there
PLACES: Sequence[Place] = (
    ("knapformer/attention.py", "", "the attention exchange", True),
    ("knapformer/exchange.py", "", "the routing of tokens", True),
    ("knapformer/balancer.py", "gather_lengths", "the gathering of lengths", True),
    ("_fsdp_collectives.py", "foreach_reduce", "the reduction of gradients", True),
    ("_fsdp_collectives.py", "", "the gathering of parameters", True),
    ("utils/clip_grad.py", "", "the gradient norm", True),
    ("training/checkpoint.py", "", "the checkpoint", True),
    ("training/sampling.py", "draw_shared", "the drawing of samples", True),
    ("training/preflight.py", "", "the preflight", True),
    ("training/parallel.py", "share_error", "the sharing of errors", True),
    ("training/ahead.py", "prepare", "the reading of data", False),
)
COLLECTIVE: Place = (
    "distributed/distributed_c10d.py",
    "",
    "a collective",
    True,
)  # where nothing else is known


@dataclass(frozen=True)
class Stand:
    """Where a rank stands: optimizer steps done, the place, and whether it waits for others there."""

    step: int | None
    place: str
    waits: bool


def stand() -> Stand:
    """Where this process stands, by the stacks of its threads.

    The main thread counts, and where it waits for another one, that one: the next batch, or on a GPU the
    backward pass.
    """
    frames = sys._current_frames()
    main = frames[threading.main_thread().ident or 0]
    ahead = [
        frames[t.ident] for t in threading.enumerate() if t.name.startswith("ahead") and t.ident in frames
    ]
    stacks = [main]
    if _place(main, [("training/ahead.py", "prepare_ahead", "", True)]):
        stacks += ahead
    elif _place(main, [("torch/autograd/graph.py", "", "", True)]):
        stacks += [frame for frame in frames.values() if frame not in ahead]
    known = (_place(frame, places) for places in (PLACES, [COLLECTIVE]) for frame in stacks)
    name, waits = next((place for place in known if place), ("the computation", False))
    return Stand(here().step, name, waits)


def _place(frame: FrameType | None, places: Sequence[Place]) -> tuple[str, bool] | None:
    """The innermost known place of a stack."""
    while frame is not None:
        code = frame.f_code
        for part, function, name, waits in places:
            if part in code.co_filename and function in ("", code.co_name):
                return name, waits
        frame = frame.f_back
    return None


@contextmanager
def watching(folder: Path, rank: int, hosts: Sequence[str], timeout: float) -> Iterator[None]:
    """Watch this rank's progress (phase.mark) while the block runs; hosts are those of all ranks."""
    over = threading.Event()
    watch = _Watch(folder, rank, hosts, timeout)
    thread = threading.Thread(target=watch.run, args=(over,), name="watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()


class _Watch:
    def __init__(self, folder: Path, rank: int, hosts: Sequence[str], timeout: float):
        self.folder, self.rank, self.hosts, self.timeout = folder, rank, hosts, timeout
        self.spoke = self.judged = False

    def run(self, over: threading.Event) -> None:
        while not over.wait(min(1.0, self.timeout / 20)):
            still = (time.monotonic() - here().since) / self.timeout
            if still < SPEAK:
                self._take_back()
            elif still < JUDGE and not self.spoke:
                self._speak()
            elif still >= JUDGE and self.spoke and not self.judged:
                self._judge()

    def _speak(self) -> None:
        self.spoke = True
        with suppress(OSError):
            (self.folder / "failures").mkdir(exist_ok=True)
            _stall(self.folder, self.rank).write_text(json.dumps(asdict(stand())))

    def _judge(self) -> None:
        self.judged = True
        stands = {rank: read for rank in range(len(self.hosts)) if (read := _read(self.folder, rank))}
        late, why = find_late(stands, len(self.hosts), self.timeout)
        step = stands[self.rank].step if self.rank in stands else None
        write_failure(self.folder, Failure(late, self.hosts[late], step, why, code=1), by=self.rank)

    def _take_back(self) -> None:
        """It went on after all: a slow disk is no failure."""
        if self.spoke:
            _stall(self.folder, self.rank).unlink(missing_ok=True)
        if self.judged:
            path_of(self.folder, self.rank).unlink(missing_ok=True)
        self.spoke = self.judged = False


def find_late(stands: dict[int, Stand], ranks: int, timeout: float) -> tuple[int, str]:
    """The rank that keeps the others waiting, and why we think so; ranks without a stand said nothing."""
    waiting = {rank: s for rank, s in stands.items() if s.waits}
    first, place = min(waiting.items(), key=lambda item: item[0], default=(None, None))
    where = f"{place.place}, where rank {first} waits" if place else "the next step"
    for rank in range(ranks):
        if rank not in stands:
            return rank, f"gives no sign of life and did not arrive within {timeout:g} s at {where}"
    for rank, s in stands.items():
        if not s.waits:
            return rank, f"is still at {s.place} and did not arrive within {timeout:g} s at {where}"
    behind = min(waiting, key=lambda rank: (waiting[rank].step or 0, rank))
    places = ", ".join(f"rank {rank} at {s.place}" for rank, s in sorted(waiting.items())[:4])
    return behind, f"all ranks wait for each other for {timeout:g} s ({places}): their network fails"


def _stall(folder: Path, rank: int) -> Path:
    return folder / "failures" / f"stall-{rank:05d}.json"


def _read(folder: Path, rank: int) -> Stand | None:
    try:
        return Stand(**json.loads(_stall(folder, rank).read_text()))
    except (OSError, ValueError, TypeError):
        return None
