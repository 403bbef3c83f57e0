"""The elastic planner: every sequence chooses its own degree and its own ranks, and rank sets may overlap.

S sequences, G degrees.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

import numpy as np

from knapformer.plan import RoutingPlan
from knapformer.planners.bench import Bench, Job
from knapformer.planners.repair import even
from knapformer.planners.static import plan_home, plan_static
from knapformer.workload import WorkloadModel

# Loads within 1/256 of the bound count as equal: there fewer tokens on the move are worth more.
TOLERANCE = 256


def plan_elastic(
    len_S: np.ndarray,
    home_S: np.ndarray,
    *,
    ranks: int,
    heads: int,
    cost: WorkloadModel,
    domain: int,
    max_tokens: int | None,
) -> RoutingPlan | None:
    """Least predicted seconds, then fewest tokens moved; None where no candidate stays under max_tokens."""
    if not len(len_S):
        return RoutingPlan.of_pieces(ranks, home_S, len_S, len_S, len_S)
    job = Job.of(len_S, home_S, ranks=ranks, heads=heads, cost=cost, domain=domain, cap=max_tokens)
    best = _search(job)
    plans = [_plan(best, home_S)] if best else []
    if best is None or max(best.load_R) > best.goal:
        plans += _fixed_plans(job, len_S, home_S, heads, cost, domain)
    able = [plan for plan in plans if plan.peak_tokens() <= job.cap]
    return min(able, key=lambda plan: plan.seconds(cost), default=None)


def _search(job: Job) -> Bench | None:
    """The best of a fixed number of candidates: below the goal and hedged, or else as near as can be."""
    goal = job.bound + job.bound // TOLERANCE
    mean_heads = sum(job.home_heads_R) // job.ranks
    spread = max(mean_heads * 19 // 20, (3 * (job.bound + mean_heads // 3) * 35 // 34 - 3 * goal) // 2)
    best: tuple[tuple[int, int], Bench] | None = None
    tried = set()
    for i, (most, heads) in enumerate([(goal, spread), *((goal * e // 8, 8 * goal) for e in (5, 8, 7, 6, 4, 3, 2, 1))]):
        choice_S, total = _degrees(job, most, heads)
        if choice_S.tobytes() in tried or (best and total >= max(best[1].load_R) * job.ranks):
            continue
        tried.add(choice_S.tobytes())
        bench = _construct(job, goal, choice_S)
        if bench is None:
            continue
        slow = max(0, max(bench.load_R) - goal)
        shaky = max(0, *map(bench.excess, bench.load_R, bench.heads_R))
        if best is None or (slow, shaky) < best[0]:
            best = (slow, shaky), bench
        if best[0] == (0, 0) or (best[0][0] == 0 and i >= 4):
            break
    return best and best[1]


def _degrees(job: Job, most: int, heads: int) -> tuple[np.ndarray, int]:
    """[S] index of the least degree whose even shards cost at most `most`, of it `heads` for attention.

    Else of the degree whose shards cost least. Also returns the cost of all.
    """
    share_SG = -(-np.array(job.lens)[:, None] // np.array(job.degrees))
    each_SG = job.fixed_SG + job.slope_G * share_SG
    each_SG[np.array(job.degrees) > np.array(job.lens)[:, None]] = np.iinfo(np.int64).max
    fits_SG = (each_SG <= most) & (job.fixed_SG <= heads) & (share_SG <= job.cap)
    choice_S = np.where(fits_SG.any(1), fits_SG.argmax(1), each_SG.argmin(1))
    rows = np.arange(len(choice_S))
    total_S = job.fixed_SG[rows, choice_S] * np.array(job.degrees)[choice_S]
    return choice_S, int((total_S + job.slope_G[choice_S] * np.array(job.lens)).sum())


def _fixed_plans(job, len_S, home_S, heads, cost, domain) -> Iterator[RoutingPlan]:
    """What the other layouts would do: the elastic planner must not be worse."""
    yield plan_home(len_S, home_S, ranks=job.ranks)
    for degree in job.degrees:
        if job.ranks % degree == 0 and domain % degree == 0:
            layout = f"g{degree}n{job.ranks // degree}"
            yield plan_static(
                len_S, home_S, ranks=job.ranks, layout=layout, heads=heads, cost=cost, domain=domain
            )


def _construct(job: Job, goal: int, choice_S: np.ndarray) -> Bench | None:
    bench = Bench(job, goal)
    aside = _place_splits(bench, choice_S)
    if aside is None or not _fill(bench, _settle(bench, aside)):
        return None
    steps = 4 * job.ranks + 64
    even(bench, steps)
    if max(bench.load_R) <= goal:
        plain, bench.hedged = bench.copy(), True
        even(bench, steps)
        if max(bench.load_R) > goal:
            bench = plain
        bench.hedged = True
    return bench if max(bench.tokens_R) <= job.cap else None


def _place_splits(bench: Bench, choice_S: np.ndarray) -> dict[int, list[int]] | None:
    """Costliest first: to the home block while it has room, else to the block with most.

    Returns by rank the whole sequences that were put aside where shards came; None where the cap is in the way.
    """
    job = bench.job
    aside: dict[int, list[int]] = {}
    long = np.flatnonzero(choice_S)
    if not len(long):
        return aside
    for seq in long.tolist():
        bench.lift(seq)
    home_R = list(bench.load_R)
    room_B = [sum(bench.goal - home_R[r] for r in block) for block in bench.blocks]
    share = sum(job.home_heads_R) * 9 // (8 * job.ranks)
    load_B = [[0, 0] for _ in bench.blocks]
    whole_B = [(sum(home_R[r] for r in b), sum(bench.heads_R[r] for r in b)) for b in bench.blocks]

    def heads_over(b: int, load: int, heads: int) -> int:
        """Heads' work of the block beyond its share, after a sequence comes and its own whole ones make way."""
        load, heads = load + load_B[b][0], heads + load_B[b][1]
        whole, whole_heads = whole_B[b]
        stay = max(0, min(whole, len(bench.blocks[b]) * bench.goal - load))
        return max(0, heads + whole_heads * stay // max(whole, 1) - len(bench.blocks[b]) * share)

    link_R = list(range(job.ranks))
    g_S = choice_S[long]
    total_S = job.fixed_SG[long, g_S] * np.array(job.degrees)[g_S] + job.slope_G[g_S] * np.array(job.lens)[long]
    for at in np.argsort(-total_S, kind="stable").tolist():
        seq, g, total = int(long[at]), int(g_S[at]), int(total_S[at])
        degree = job.degrees[g]
        tokens = -(-job.lens[seq] // degree)

        def held(r: int) -> int:
            return bench.tokens_R[r] if r in aside else 0

        def able(b: int) -> list[int]:
            return [r for r in bench.blocks[b] if held(r) + tokens <= job.cap]

        own = job.block_R[job.homes[seq]]
        heads = degree * int(job.fixed_SG[seq, g])
        def clean(b: int) -> bool:
            held_heads = sorted(bench.heads_R[r] if r in aside else 0 for r in able(b))
            limit = 3 * (bench.goal_up - bench.goal)
            return len(held_heads) >= degree and held_heads[degree - 1] + heads // degree <= limit

        if not (room_B[own] >= total and not heads_over(own, total, heads) and clean(own)):
            fitting = [b for b in range(len(room_B)) if len(able(b)) >= degree]
            if not fitting:
                return None
            own = max(fitting, key=lambda b: (-heads_over(b, total, heads), clean(b), room_B[b], b == own, -b))
        load_B[own][0] += total
        load_B[own][1] += heads
        each = int(job.fixed_SG[seq, g]) + int(job.slope_G[g]) * tokens
        hosts = _choose_hosts(bench, able(own), degree, each, job.homes[seq], home_R, aside, link_R)
        for rank in hosts:
            if rank not in aside:
                aside[rank], bench.wholes_R[rank] = bench.wholes_R[rank], []
                bench.load_R[rank] = bench.tokens_R[rank] = bench.heads_R[rank] = 0
        bench.split(seq, hosts, g)
        for rank in hosts:
            bench.pour(rank, bench.goal, bench.goal)
        room_B[own] -= total
        links = {link_R[r] for r in hosts}
        for rank in bench.blocks[own]:
            if link_R[rank] in links:
                link_R[rank] = min(links)
    return aside


def _choose_hosts(bench, ranks, degree, each, home, home_R, aside, link_R) -> list[int]:
    """The least loaded ranks; where they would overflow, of as many groups of linked ranks as possible."""

    def load(r: int) -> int:
        return bench.load_R[r] if r in aside else 0

    def heads(r: int) -> int:
        return bench.heads_R[r] if r in aside else 0

    ranks = sorted(ranks, key=lambda r: (heads(r), min(load(r) + home_R[r], bench.goal), load(r), r != home, r))
    if max(load(r) for r in ranks[:degree]) + each > bench.goal:
        seen: dict[int, int] = {}
        turn = {}
        for r in ranks:
            turn[r] = seen[link_R[r]] = seen.get(link_R[r], -1) + 1
        ranks.sort(key=lambda r: turn[r])
    return sorted(ranks[:degree])


def _settle(bench: Bench, aside: dict[int, list[int]]) -> list[int]:
    """Let every rank keep its own whole sequences, costliest first, up to goal and cap; returns the others."""
    pool = []
    for rank in range(bench.job.ranks):
        load, tokens, heads, kept = 0, 0, 0, []
        if rank in aside:
            free, load, tokens = aside[rank], bench.load_R[rank], bench.tokens_R[rank]
            heads = bench.heads_R[rank]
        elif bench.load_R[rank] > bench.goal or bench.tokens_R[rank] > bench.cap:
            free, bench.wholes_R[rank] = bench.wholes_R[rank], []
        else:
            continue
        for piece in free:
            if load + bench.load[piece] <= bench.goal and tokens + bench.tokens[piece] <= bench.cap:
                load += bench.load[piece]
                tokens += bench.tokens[piece]
                heads += bench.heads[piece]
                kept.append(piece)
            else:
                pool.append(piece)
        bench.wholes_R[rank] += kept
        bench.load_R[rank], bench.tokens_R[rank], bench.heads_R[rank] = load, tokens, heads
    return pool


def _fill(bench: Bench, pool: list[int]) -> bool:
    """Costliest first, best fit; what fits nowhere goes where most room is, and shards make way for it."""
    if not pool:
        return True
    shelves = Shelves(bench)
    for piece in sorted(pool, key=lambda p: (-bench.load[p], p)):
        rank = shelves.best_fit(piece)
        if rank < 0:
            rank = shelves.most_room(piece)
        if rank < 0:
            return False
        bench.touched.clear()
        bench.put(piece, rank)
        bench.pour(rank, bench.goal, bench.goal)
        shelves.update(bench.touched)
    return True


class Shelves:
    """Ranks in order of the room that they have left, all together and by block."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.room_R = [bench.goal - load for load in bench.load_R]
        self.all = sorted(zip(self.room_R, range(len(self.room_R)), strict=True))
        self.room_B = [0] * len(bench.blocks)
        self.blocks: list[list[tuple[int, int]]] = [[] for _ in bench.blocks]
        for room, rank in self.all:
            self.blocks[bench.block_R[rank]].append((room, rank))
            self.room_B[bench.block_R[rank]] += room

    def update(self, ranks: set[int]) -> None:
        """Put ranks where their load now belongs."""
        for rank in ranks:
            old, room, b = self.room_R[rank], self.bench.goal - self.bench.load_R[rank], self.bench.block_R[rank]
            for shelf in (self.all, self.blocks[b]):
                shelf.pop(bisect_left(shelf, (old, rank)))
                insort(shelf, (room, rank))
            self.room_R[rank] = room
            self.room_B[b] += room - old

    def best_fit(self, piece: int) -> int:
        """The rank with the least room that holds the piece, in its home block if any there; -1 if none."""
        bench = self.bench
        for shelf in (self.blocks[bench.block_R[bench.home[piece]]], self.all):
            for _, rank in shelf[bisect_left(shelf, (bench.load[piece], -1)) :]:
                if bench.tokens_R[rank] + bench.tokens[piece] <= bench.cap:
                    return rank
        return -1

    def most_room(self, piece: int) -> int:
        """The roomiest rank that the piece's tokens fit, of the roomiest block; -1 if there is none."""
        for _, b in sorted((-room, b) for b, room in enumerate(self.room_B)):
            for _, rank in reversed(self.blocks[b]):
                if self.bench.tokens_R[rank] + self.bench.tokens[piece] <= self.bench.cap:
                    return rank
        return -1


def _plan(bench: Bench, home_S: np.ndarray) -> RoutingPlan:
    host_P, seq_P, len_P = (np.array(x, np.int64) for x in (bench.host, bench.seq, bench.tokens))
    used = host_P >= 0
    return RoutingPlan.of_pieces(bench.job.ranks, home_S, seq_P[used], len_P[used], host_P[used])
