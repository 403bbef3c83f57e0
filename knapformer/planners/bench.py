"""The workbench of the elastic planner: pieces of sequences on ranks, in exact integers.

S sequences, R ranks, G degrees; a piece is a whole sequence or one shard of a split one.
"""

import copy
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from knapformer.layout import split_degrees
from knapformer.workload import WorkloadModel

# Loads within 1/256 of the bound count as equal: there fewer tokens on the move are worth more. Within 1/208 no
# other layout can be faster by more than the half percent that a plan may be beaten by: there the search ends.
TOLERANCE, CLOSE = 256, 208


@dataclass(frozen=True)
class AtHome:
    """Load, tokens, attention and whole sequences (costliest first) of each rank, and those of other jobs' ranks."""

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
        """The job of those sequences on whole blocks of those ranks (ascending), which are 0, 1, ... in it."""
        local_R = np.full(self.ranks + 1, -1)
        local_R[rank_R] = np.arange(len(rank_R))
        _, block_R = np.unique(np.array(self.block_R)[rank_R], return_inverse=True)
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
        return self.bound + self.bound // CLOSE

    @property
    def room_up(self) -> int:
        """Attention that a rank at the goal may hold."""
        return 3 * (self.goal_up - self.goal)


class Bench:
    """Pieces p with seq[p], tokens[p] and load[p] on rank host[p]; and what each rank holds in sum.

    Pieces 0..S-1 are the whole sequences, at home at first; `split` replaces one by shards. A shard costs
    its share of the heads plus slope[p] for each of its tokens, so shards of a sequence can trade tokens.
    Whole sequences go to any rank, shards to ranks of their block that hold no other shard of the sequence.
    """

    def __init__(self, job: Job) -> None:
        self.job, self.goal, self.cap = job, job.goal, job.cap
        self.hedged = False
        self.touched: set[int] = set()
        home = job.at_home
        self.load_R, self.tokens_R, self.heads_R = list(home.load_R), list(home.tokens_R), list(home.heads_R)
        self.wholes_R = [list(pieces) for pieces in home.pieces_R]
        self.shards_R: list[list[int]] = [[] for _ in range(job.ranks)]
        self.home, self.host = job.home_S.tolist(), job.home_S.tolist()
        self.load, self.tokens, self.heads = job.whole_S.tolist(), job.len_S.tolist(), job.heads_S.tolist()
        self.seq = list(range(len(job.len_S)))
        self.slope = [0] * len(job.len_S)
        self.mates: list[list[int]] = [[]] * len(job.len_S)
        self.block_R = job.block_R
        self.blocks: list[list[int]] = [[] for _ in range(job.block_R[-1] + 1)]
        for rank, block in enumerate(job.block_R):
            self.blocks[block].append(rank)

    def copy(self) -> "Bench":
        """The same state, to return to."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, list):
                setattr(twin, name, list(value))
        twin.wholes_R = [list(pieces) for pieces in self.wholes_R]
        twin.shards_R = [list(pieces) for pieces in self.shards_R]
        return twin

    def lay_aside(self, ranks: Iterable[int]) -> dict[int, list[int]]:
        """Take all whole sequences off ranks that hold no shards; returns them by rank."""
        aside = {}
        for rank in ranks:
            aside[rank], self.wholes_R[rank] = self.wholes_R[rank], []
            self.load_R[rank] = self.tokens_R[rank] = self.heads_R[rank] = 0
        return aside

    def lift(self, piece: int) -> None:
        """Take the piece off its rank, if it lies on one."""
        host = self.host[piece]
        if host < 0:
            return
        (self.shards_R if self.mates[piece] else self.wholes_R)[host].remove(piece)
        self.load_R[host] -= self.load[piece]
        self.tokens_R[host] -= self.tokens[piece]
        self.heads_R[host] -= self.heads[piece]
        self.touched.add(host)

    def put(self, piece: int, rank: int) -> None:
        """Lay a lifted piece on a rank."""
        self.host[piece] = rank
        (self.shards_R if self.mates[piece] else self.wholes_R)[rank].append(piece)
        self.load_R[rank] += self.load[piece]
        self.tokens_R[rank] += self.tokens[piece]
        self.heads_R[rank] += self.heads[piece]
        self.touched.add(rank)

    def move(self, piece: int, rank: int) -> None:
        """Take the piece from its rank to another."""
        self.lift(piece)
        self.put(piece, rank)

    def excess(self, load: int, heads: int) -> int:
        """How far a rank of this load is beyond what the step and its hedge allow."""
        slow = load - self.goal
        return max(slow, self.shakiness(load, heads)) if self.hedged else slow

    def shakiness(self, load: int, heads: int) -> int:
        """How far a rank of this load is beyond what the hedge allows."""
        return max(load + heads // 3 - self.job.goal_up, load - heads // 5 - self.job.goal_down)

    def excess_of(self, rank: int) -> int:
        return self.excess(self.load_R[rank], self.heads_R[rank])

    def home_block(self, piece: int) -> int:
        """The block that loaded the piece; the first if it comes from elsewhere."""
        home = self.home[piece]
        return self.block_R[home] if home >= 0 else 0

    def may_go(self, shard: int, rank: int) -> bool:
        """Whether the rank, of the shard's block, hosts no other shard of its sequence."""
        return all(self.host[mate] != rank for mate in self.mates[shard])

    def split(self, seq: int, hosts: list[int], g: int) -> None:
        """Replace a lifted whole sequence by shards on hosts, as even as whole tokens allow."""
        count, more = divmod(self.tokens[seq], len(hosts))
        fixed, slope = self.heads[seq] // len(hosts), self.job.slopes[g]
        mates = list(range(len(self.seq), len(self.seq) + len(hosts)))
        self.host[seq] = -1
        for i, rank in enumerate(hosts):
            self.seq.append(seq)
            self.home.append(self.home[seq])
            self.host.append(-1)
            self.tokens.append(count + (i < more))
            self.load.append(fixed + slope * self.tokens[-1])
            self.slope.append(slope)
            self.heads.append(fixed)
            self.mates.append(mates)
            self.put(mates[i], rank)

    def pour(self, hot: int, level: int, roof: int) -> bool:
        """Shift tokens between shards of the same sequences, over as few ranks as possible, until `hot` is at
        the level or no rank linked to it is below the roof; whether that helped."""
        before = self.load_R[hot]
        while self.load_R[hot] > level:
            path = self._path_to_room(hot, roof)
            if not path:
                break
            last = self.host[path[-1][1]]
            count = min(
                *(self.tokens[giver] - 1 for giver, _ in path),
                -(-(self.load_R[hot] - level) // self.slope[path[0][0]]),
                (self._roof(last, roof) - self.load_R[last]) // self.slope[path[-1][1]],
                self.cap - self.tokens_R[last],
            )
            for giver, taker in path:
                self._shift(giver, -count)
                self._shift(taker, count)
        return self.load_R[hot] < before

    def _roof(self, rank: int, roof: int) -> int:
        """How far the rank may be filled: once the plan is hedged, not beyond what its attention allows."""
        return min(roof, self.job.goal_up - self.heads_R[rank] // 3) if self.hedged else roof

    def _shift(self, piece: int, count: int) -> None:
        rank, units = self.host[piece], count * self.slope[piece]
        self.tokens[piece] += count
        self.load[piece] += units
        self.tokens_R[rank] += count
        self.load_R[rank] += units
        self.touched.add(rank)

    def _path_to_room(self, hot: int, roof: int) -> list[tuple[int, int]]:
        """(giving shard, taking shard) from rank to rank; breadth first, so the path is a shortest one."""
        block = self.blocks[self.block_R[hot]]
        if not any(self.load_R[r] < self._roof(r, roof) and self.tokens_R[r] < self.cap for r in block if r != hot):
            return []
        came: dict[int, tuple[int, int]] = {hot: (-1, -1)}
        queue, seen = deque([hot]), set()
        while queue:
            for giver in self.shards_R[queue.popleft()]:
                if self.tokens[giver] < 2 or not self.slope[giver] or self.seq[giver] in seen:
                    continue
                seen.add(self.seq[giver])
                for taker in self.mates[giver]:
                    rank = self.host[taker]
                    if rank in came:
                        continue
                    came[rank] = (giver, taker)
                    queue.append(rank)
                    room = self._roof(rank, roof) - self.load_R[rank]
                    if room >= self.slope[taker] and self.tokens_R[rank] < self.cap:
                        path = [came[rank]]
                        while (rank := self.host[path[-1][0]]) != hot:
                            path.append(came[rank])
                        return path[::-1]
        return []
