"""The workbench of the elastic planner: pieces of sequences on ranks.

R ranks, G degrees; a piece is a whole sequence or one shard of a split one.
"""

import copy
from collections import deque
from collections.abc import Iterable

from knapformer.planners.job import Job


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
        if not any(
            self.load_R[r] < self._roof(r, roof) and self.tokens_R[r] < self.cap for r in block if r != hot
        ):
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
