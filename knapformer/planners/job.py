"""What the elastic planner plans: exact integer costs, the goal of a rank, and how the batch lies at home.

S sequences, R ranks, G degrees.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from knapformer.layout import split_degrees
from knapformer.workload import WorkloadModel

# Loads within 1/256 of the bound count as equal: there fewer tokens on the move are worth more. A plan within
# 1/208 can be beaten by less than half a percent, by whatever layout: there the search ends.
TOLERANCE, CLOSE = 256, 208


@dataclass(frozen=True)
class AtHome:
    """Load, tokens, attention and sequences (costliest first) of each rank, and sequences of other ranks."""

    load_R: list[int]
    tokens_R: list[int]
    heads_R: list[int]
    pieces_R: list[list[int]]
    elsewhere: list[int]


@dataclass(frozen=True, eq=False)
class Job:
    """What all candidates of one batch share: its costs, its goal, and where it lies at home (-1: elsewhere).

    A shard of sequence s split by degrees[g] costs heads_S[s] // degrees[g] for its heads and slopes[g] for
    each of its tokens; whole_S is the cost at degree 1. Costs are integers on a scale (a power of two) that
    puts the costliest sequence near 2^40: no sum depends on its order, so every machine decides alike.

    A rank should be at the lower bound of the step, or nearly: at `goal`. The hedge: should attention cost
    4/3 or 4/5 of what the cost model says (it is wrong by a quarter, either way), a rank should still not be
    over the mean by more than 3 %: at most `goal_up` and `goal_down` under these costs.
    """

    ranks: int
    degrees: list[int]
    block_R: list[int]
    cap: int
    bound: int
    goal: int
    goal_up: int
    goal_down: int
    len_S: np.ndarray
    home_S: np.ndarray
    whole_S: np.ndarray
    heads_S: np.ndarray
    slopes: list[int]

    @classmethod
    def of(
        cls,
        len_S: np.ndarray,
        home_S: np.ndarray,
        *,
        ranks: int,
        heads: int,
        cost: WorkloadModel,
        domain: int,
        cap: int | None,
    ) -> "Job":
        degrees = split_degrees(heads, ranks, domain)
        degree_G = np.array(degrees)
        scale = 2.0 ** (40 - math.frexp(float(cost.seconds(len_S).max()))[1])
        slope_G = np.rint(scale * cost.chunk_seconds(1.0, 0.0, degree_G)).astype(np.int64)
        heads_S = np.rint(scale * cost.chunk_work(0.0, len_S, 1)).astype(np.int64)
        whole_S = heads_S + slope_G[0] * len_S
        bound = int(cost.lower_bound(len_S, ranks, degrees) * scale)
        mean_heads = int(heads_S.sum()) // ranks
        return cls(
            ranks=ranks,
            degrees=degrees,
            block_R=[rank // domain for rank in range(ranks)],
            cap=int(len_S.sum()) if cap is None else cap,
            bound=bound,
            goal=bound + bound // TOLERANCE,
            goal_up=(bound + mean_heads // 3) * 35 // 34,
            goal_down=(bound - mean_heads // 5) * 35 // 34,
            len_S=len_S,
            home_S=home_S,
            whole_S=whole_S,
            heads_S=heads_S,
            slopes=slope_G.tolist(),
        )

    def part(self, rank_R: np.ndarray, seq_S: np.ndarray) -> "Job":
        """The job of those sequences on those ranks (whole blocks, ascending), which are 0, 1, ... in it."""
        local_R = np.full(self.ranks + 1, -1)
        local_R[rank_R] = np.arange(len(rank_R))
        was_R = np.array([self.block_R[rank] for rank in rank_R.tolist()])
        block_R = np.cumsum(np.diff(was_R, prepend=was_R[0]) != 0)
        widest = int(np.bincount(block_R).max())
        degrees = [degree for degree in self.degrees if degree <= widest]
        return replace(
            self,
            ranks=len(rank_R),
            degrees=degrees,
            block_R=block_R.tolist(),
            len_S=self.len_S[seq_S],
            home_S=local_R[self.home_S[seq_S]],
            whole_S=self.whole_S[seq_S],
            heads_S=self.heads_S[seq_S],
            slopes=self.slopes[: len(degrees)],
        )

    @cached_property
    def at_home(self) -> "AtHome":
        """What every rank holds before anything is placed."""
        order = np.lexsort((-self.whole_S, self.home_S))
        ends_R = np.cumsum(np.bincount(self.home_S + 1, minlength=self.ranks + 1))

        def per_rank(value_S: np.ndarray) -> list[int]:
            return np.diff(np.append(0, np.cumsum(value_S[order]))[ends_R]).tolist()

        pieces, ends = order.tolist(), ends_R.tolist()
        return AtHome(
            load_R=per_rank(self.whole_S),
            tokens_R=per_rank(self.len_S),
            heads_R=per_rank(self.heads_S),
            pieces_R=[pieces[ends[r] : ends[r + 1]] for r in range(self.ranks)],
            elsewhere=pieces[: ends[0]],
        )

    @property
    def close(self) -> int:
        """Load of a rank at which the search may end."""
        return max(self.goal, self.bound + self.bound // CLOSE)

    @property
    def room_up(self) -> int:
        """Attention that a rank at the goal may hold."""
        return 3 * (self.goal_up - self.goal)
