"""The elastic planner's construction: split sequences first, then every rank keeps of its own what it can,
then the rest fills what room is left.

S sequences, R ranks, B blocks (a block is a sequence-parallel domain).
"""

from bisect import bisect_left, insort

import numpy as np

from knapformer.planners.bench import Bench
from knapformer.planners.candidates import Candidate


def place(bench: Bench, candidate: Candidate) -> bool:
    """Place all sequences, split as the candidate has it; False if the cap is in the way."""
    choice_S, hosts_of = candidate.choice_S, candidate.hosts_of
    long = np.flatnonzero(choice_S)
    for seq in long.tolist():
        bench.lift(seq)
    elsewhere = [piece for piece in bench.job.at_home.elsewhere if not choice_S[piece]]
    if not len(long):
        over = [
            r for r in range(bench.job.ranks) if bench.load_R[r] > bench.goal or bench.tokens_R[r] > bench.cap
        ]
        return _fill(bench, elsewhere + _keep(bench, bench.lay_aside(over)))
    splits = Splits(bench)
    job, g_S = bench.job, choice_S[long]
    total_S = job.heads_S[long] + np.array(job.slopes)[g_S] * job.len_S[long]
    costliest = np.argsort(-total_S, kind="stable")
    for seq, g, total in zip(*(x[costliest].tolist() for x in (long, g_S, total_S)), strict=True):
        if hosts_of:
            splits.put(seq, g, total, hosts_of[seq])
        elif not splits.place(seq, g, total):
            return False
    return _fill(bench, elsewhere + _keep(bench, splits.aside))


class Splits:
    """Places split sequences on ranks that have laid their whole ones aside."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.whole_R, self.whole_heads_R = list(bench.load_R), list(bench.heads_R)
        self.aside = bench.lay_aside(range(bench.job.ranks))
        self.share = int(bench.job.heads_S.sum()) * 9 // (8 * bench.job.ranks)
        self.room_B = [sum(bench.goal - self.whole_R[r] for r in block) for block in bench.blocks]
        # Ranks that share a sequence, directly or over others, can level their loads by pouring.
        self.link_R = list(range(bench.job.ranks))

    def place(self, seq: int, g: int, total: int) -> bool:
        """To the home block while it has room for it, else to the roomiest where attention stays even."""
        bench, job = self.bench, self.bench.job
        degree, home = job.degrees[g], bench.home[seq]
        tokens, fixed = -(-bench.tokens[seq] // degree), bench.heads[seq] // degree
        own = bench.home_block(seq)
        order = sorted(range(len(self.room_B)), key=lambda b: (-self.room_B[b], b != own, b))
        if self.room_B[own] >= total:
            order.insert(0, own)
        best: tuple[int, bool, list[int]] | None = None
        for tries, b in enumerate(order):
            ranks = [r for r in bench.blocks[b] if bench.tokens_R[r] + tokens <= bench.cap]
            if len(ranks) < degree:
                continue
            crowd = self._crowd(b, total, degree * fixed)
            clash = sorted([bench.heads_R[r] for r in ranks])[degree - 1] + fixed > job.room_up
            if best is None or (crowd, clash) < best[:2]:
                best = (crowd, clash, ranks)
            if best[:2] == (0, False) or tries == 16:
                break
        if best is None:
            return False
        self.put(seq, g, total, self._hosts(best[2], degree, fixed + job.slopes[g] * tokens, home))
        return True

    def put(self, seq: int, g: int, total: int, hosts: list[int]) -> None:
        """Split the sequence over its hosts, and pour where they overflow."""
        bench = self.bench
        bench.split(seq, hosts, g)
        for rank in hosts:
            bench.pour(rank, bench.goal, bench.goal)
        self.room_B[bench.block_R[hosts[0]]] -= total
        links = {self.link_R[rank] for rank in hosts}
        for rank in bench.blocks[bench.block_R[hosts[0]]]:
            if self.link_R[rank] in links:
                self.link_R[rank] = min(links)

    def _crowd(self, b: int, load: int, heads: int) -> int:
        """Attention of the block beyond its share, once the sequence is here and whole ones have made way."""
        bench, block = self.bench, self.bench.blocks[b]
        whole = sum([self.whole_R[r] for r in block])
        load += sum([bench.load_R[r] for r in block])
        heads += sum([bench.heads_R[r] for r in block])
        if whole:
            stay = max(0, min(whole, len(block) * bench.goal - load))
            heads += sum([self.whole_heads_R[r] for r in block]) * stay // whole
        return max(0, heads - len(block) * self.share)

    def _hosts(self, ranks: list[int], degree: int, each: int, home: int) -> list[int]:
        """The ranks with least attention and load; if these overflow, of as many linked groups as can be."""
        bench = self.bench

        def heat(r: int) -> tuple[int, int, int, bool, int]:
            load = bench.load_R[r]
            return bench.heads_R[r], min(load + self.whole_R[r], bench.goal), load, r != home, r

        ranks = sorted(ranks, key=heat)
        if max(bench.load_R[r] for r in ranks[:degree]) + each > bench.goal:
            seen: dict[int, int] = {}
            turn = {}
            for r in ranks:
                turn[r] = seen[self.link_R[r]] = seen.get(self.link_R[r], -1) + 1
            ranks.sort(key=turn.__getitem__)
        return sorted(ranks[:degree])


def _keep(bench: Bench, aside: dict[int, list[int]]) -> list[int]:
    """Let every rank keep its own whole sequences, costliest first, up to goal and cap; the others remain."""
    pool: list[int] = []
    for rank, kept in aside.items():
        room, free = bench.goal - bench.load_R[rank], bench.cap - bench.tokens_R[rank]
        load, tokens = sum([bench.load[p] for p in kept]), sum([bench.tokens[p] for p in kept])
        if load > room or tokens > free:
            pieces, kept, load, tokens = kept, [], 0, 0
            for piece in pieces:
                if load + bench.load[piece] <= room and tokens + bench.tokens[piece] <= free:
                    load += bench.load[piece]
                    tokens += bench.tokens[piece]
                    kept.append(piece)
                else:
                    pool.append(piece)
        bench.wholes_R[rank] = kept
        bench.load_R[rank] += load
        bench.tokens_R[rank] += tokens
        bench.heads_R[rank] += sum([bench.heads[p] for p in kept])
    return pool


def _fill(bench: Bench, pool: list[int]) -> bool:
    """Costliest first, best fit; what fits nowhere goes where most room is, and shards make way."""
    if not pool:
        return True
    shelves, dry = Shelves(bench), set()
    for piece in sorted(pool, key=lambda p: (-bench.load[p], p)):
        rank = shelves.best_fit(piece)
        if rank < 0:
            rank = shelves.most_room(piece)
        if rank < 0:
            return False
        bench.touched.clear()
        bench.put(piece, rank)
        # Filling takes room away only: where pouring has failed it will again.
        over = bench.load_R[rank] > bench.goal and bench.block_R[rank] not in dry
        if over and not bench.pour(rank, bench.goal, bench.goal):
            dry.add(bench.block_R[rank])
        shelves.update(bench.touched)
    return True


class Shelves:
    """Ranks in order of the room that they have left, all together and by block."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.room_R = [bench.goal - load for load in bench.load_R]
        self.all = sorted(zip(self.room_R, range(len(self.room_R)), strict=True))
        self.blocks: list[list[tuple[int, int]]] = [self.all] if len(bench.blocks) == 1 else self._by_block()
        self.room_B = [sum(self.room_R[r] for r in block) for block in bench.blocks]

    def _by_block(self) -> list[list[tuple[int, int]]]:
        blocks: list[list[tuple[int, int]]] = [[] for _ in self.bench.blocks]
        for room, rank in self.all:
            blocks[self.bench.block_R[rank]].append((room, rank))
        return blocks

    def update(self, ranks: set[int]) -> None:
        """Put ranks where their load now belongs."""
        for rank in ranks:
            b, old, room = (
                self.bench.block_R[rank],
                self.room_R[rank],
                self.bench.goal - self.bench.load_R[rank],
            )
            for shelf in [self.all] if self.all is self.blocks[b] else [self.all, self.blocks[b]]:
                shelf.pop(bisect_left(shelf, (old, rank)))
                insort(shelf, (room, rank))
            self.room_R[rank] = room
            self.room_B[b] += room - old

    def best_fit(self, piece: int) -> int:
        """The rank with the least room that holds the piece, in its home block if any there; -1 if none."""
        bench = self.bench
        for shelf in (self.blocks[bench.home_block(piece)], self.all):
            for at in range(bisect_left(shelf, (bench.load[piece], -1)), len(shelf)):
                if bench.tokens_R[shelf[at][1]] + bench.tokens[piece] <= bench.cap:
                    return shelf[at][1]
        return -1

    def most_room(self, piece: int) -> int:
        """The roomiest rank that the piece's tokens fit, of the roomiest block; -1 if there is none."""
        for b in sorted(range(len(self.room_B)), key=lambda b: (-self.room_B[b], b)):
            for _, rank in reversed(self.blocks[b]):
                if self.bench.tokens_R[rank] + self.bench.tokens[piece] <= self.bench.cap:
                    return rank
        return -1
