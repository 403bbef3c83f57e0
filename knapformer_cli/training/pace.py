"""Which rank is slow: each does the same small piece of work once a step, and their seconds are compared.

All ranks of a synchronous step take as long as the slowest, so the times of steps cannot tell who that was.
The seconds ride along with the lengths (ahead.py); R ranks.
"""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

ACROSS = {"cuda": 4096, "cpu": 256}  # sides of the matrices: about a millisecond on either


class Pace:
    """The count of pieces done by this rank, and their nanoseconds so far, as `total`."""

    def __init__(self, device: torch.device):
        side = ACROSS[device.type]
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.matrix = torch.full((side, side), 1 / side, device=device, dtype=dtype)
        self.result = torch.empty_like(self.matrix)
        self.running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self.total = (0, 0)  # replaced as a whole: another thread reads it

    def work(self) -> None:
        """Do one piece; on a GPU its time is taken up in a later call, so that nobody waits."""
        if self.matrix.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            torch.mm(self.matrix, self.matrix, out=self.result)
            end.record()
            self.running.append((begin, end))
            while self.running and self.running[0][1].query():
                begin, end = self.running.popleft()
                self._add(begin.elapsed_time(end) / 1e3)
        else:
            start = time.perf_counter()
            torch.mm(self.matrix, self.matrix, out=self.result)
            self._add(time.perf_counter() - start)

    def _add(self, seconds: float) -> None:
        self.total = (self.total[0] + 1, self.total[1] + int(seconds * 1e9))


class Paces:
    """All ranks' paces, window after window; one median rank is the measure."""

    def __init__(self, hosts: Sequence[str], threshold: float, window: int):
        """hosts: of all ranks; threshold: times the median that count as slow, 0 never; window: steps."""
        self.hosts, self.threshold, self.window = hosts, threshold, window
        self.before_R2: np.ndarray | None = None
        self.max_over_median: float | None = None
        self.slow: list[int] = []

    def compare(self, step: int, total_R2: np.ndarray) -> str | None:
        """At the end of a window a sentence about ranks slower than `threshold` medians, if there are any."""
        if step % self.window:
            return None
        before_R2, self.before_R2 = self.before_R2, total_R2
        if before_R2 is None:  # warming up
            return None
        count_R, nanoseconds_R = np.maximum(total_R2 - before_R2, 1).T
        pace_R = nanoseconds_R / count_R
        ratio_R = (
            pace_R / np.sort(pace_R)[(len(pace_R) - 1) // 2]
        )  # of two ranks the faster one is the measure
        self.max_over_median = float(ratio_R.max())
        self.slow = np.flatnonzero(ratio_R > self.threshold).tolist() if self.threshold else []
        return self._sentence(ratio_R) if self.slow else None

    def _sentence(self, ratio_R: np.ndarray) -> str:
        told = []
        for host in dict.fromkeys(self.hosts[rank] for rank in self.slow):
            there = [rank for rank, name in enumerate(self.hosts) if name == host]
            slow = [rank for rank in there if rank in self.slow]
            whole = len(slow) == len(there) > 1
            who = (
                f"node {host}, all {len(there)} ranks,"
                if whole
                else f"rank {', '.join(map(str, slow))} on {host}"
            )
            told.append(f"{who} {ratio_R[slow].max():.1f} times")
        return f"slow over the last {self.window} steps, same work against the median: {'; '.join(told)}"
