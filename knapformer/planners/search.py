"""The elastic planner's search: candidates are choices of degrees, each placed and repaired.

S sequences, G degrees.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from knapformer.planners.bench import Bench, Job
from knapformer.planners.placing import Hosts, place
from knapformer.planners.repair import even


def search(job: Job) -> Bench | None:
    """The best of a fixed number of candidates: evenly loaded and hedged, else as near to it as one comes."""
    if not len(job.len_S):
        return Bench(job)
    best: Bench | None = None
    for turn, candidate in enumerate(_candidates(job)):
        if best is not None and candidate.total >= max(best.load_R) * job.ranks:
            continue
        bench = Bench(job)
        if not place(bench, candidate.choice_S, candidate.hosts_of):
            continue
        bench = _evened(bench)
        if max(bench.tokens_R) <= job.cap and (best is None or rating(bench) < rating(best)):
            best = bench
        # Later candidates split more: worth it to be in time, not for the hedge alone, nor for its time.
        if best and rating(best)[0] == 0 and (rating(best)[1] == 0 or turn * job.ranks >= 32):
            break
    return best


def rating(bench: Bench) -> tuple[int, int]:
    """How far the worst rank is beyond what is close to the bound, and beyond the hedge; less is better."""
    shaky = max(map(bench.shakiness, bench.load_R, bench.heads_R))
    return max(0, max(bench.load_R) - bench.job.close), max(0, shaky)


def _evened(bench: Bench) -> Bench:
    """First as fast as can be; then, if that reached the goal, hedged without leaving it."""
    even(bench, 4 * bench.job.ranks + 64)
    bench.hedged = True
    shaky = max(map(bench.excess_of, range(bench.job.ranks)))
    if max(bench.load_R) > bench.goal or shaky <= 0:
        return bench
    plain = bench.copy()
    even(bench, bench.job.ranks)
    return plain if max(bench.load_R) > bench.goal else bench


@dataclass(frozen=True)
class Candidate:
    """Indices of the degrees, what all sequences then cost in sum, and the hosts of split ones if given."""

    choice_S: np.ndarray
    total: int
    hosts_of: Hosts | None = None


def _candidates(job: Job) -> Iterator[Candidate]:
    """From few splits to many; those last that no placement could hedge."""
    tried, later = set(), []
    for candidate in _choices(job):
        if candidate.hosts_of is None and candidate.choice_S.tobytes() in tried:
            continue
        tried.add(candidate.choice_S.tobytes())
        if (job.heads_S // np.array(job.degrees)[candidate.choice_S]).max() > job.room_up:
            later.append(candidate)
        else:
            yield candidate
    yield from later


def _choices(job: Job) -> Iterator[Candidate]:
    """Limits to what a shard may cost, to the attention it may have, and bags."""
    # Where the cap binds, fine shards are what fits.
    tight = 3 * int(job.len_S.sum()) > 2 * job.cap * job.ranks
    for turn, eighths in enumerate((2, 1, 3, 4, 5, 6, 7, 8) if tight else (8, 5, 7, 6, 4, 3, 2, 1)):
        yield least_degrees(job, job.goal * eighths // 8, 8 * job.goal)
        if eighths == 8:
            heads = max(int(job.heads_S.sum()) * 19 // (20 * job.ranks), job.room_up // 2)
            yield least_degrees(job, job.goal, heads)
        if turn == (0 if tight else 1 if job.ranks > 8 else 4):
            yield from (bagged(job, job.goal // parts) for parts in (2, 4, 8))


def bagged(job: Job, most: int) -> Candidate:
    """What costs more than `most` goes to few large bags that fill the ranks, costliest first, where it leaves
    least attention: inside a bag attention is even, and bags have many sequences to be even by."""
    bags: list[range] = []
    first, ranks = 0, job.ranks
    while first < ranks:
        block_end = bisect_right(job.block_R, job.block_R[first])
        size = max(degree for degree in job.degrees if degree <= block_end - first)
        bags.append(range(first, first + size))
        first += size
    choice_S, hosts_of, total = np.zeros(len(job.len_S), np.int64), {}, int(job.whole_S.sum())
    held = [0] * len(bags)
    long = np.flatnonzero((job.whole_S > most) | (job.len_S > job.cap))
    for seq in long[np.argsort(-job.whole_S[long], kind="stable")].tolist():
        tokens, heads = int(job.len_S[seq]), int(job.heads_S[seq])
        able = []
        for b, bag in enumerate(bags):
            g = job.degrees.index(len(bag))
            cost, share = heads // len(bag) + job.slopes[g] * -(-tokens // len(bag)), -(-tokens // len(bag))
            if len(bag) <= tokens and share <= job.cap and cost <= job.goal:
                able.append(((held[b] + heads) // len(bag), b, g))
        if able:
            _, b, g = min(able)
            held[b] += heads
            choice_S[seq], hosts_of[seq] = g, list(bags[b])
            total += heads + job.slopes[g] * tokens - int(job.whole_S[seq])
    return Candidate(choice_S, total, hosts_of)


def least_degrees(job: Job, most: int, heads: int) -> Candidate:
    """[S] index of the least degree whose even shards stay under both limits, else of the cheapest shards."""
    choice_S = np.zeros(len(job.len_S), np.int64)
    long = np.flatnonzero((job.whole_S > most) | (job.heads_S > heads) | (job.len_S > job.cap))
    degree_G, slope_G = np.array(job.degrees), np.array(job.slopes)
    len_S, heads_S = job.len_S[long], job.heads_S[long]
    share_SG, fixed_SG = -(-len_S[:, None] // degree_G), heads_S[:, None] // degree_G
    each_SG = fixed_SG + slope_G * share_SG
    each_SG[(degree_G > len_S[:, None]) | (share_SG > job.cap)] = np.iinfo(np.int64).max
    fits_SG = (each_SG <= most) & (fixed_SG <= heads)
    choice_S[long] = g_S = np.where(fits_SG.any(1), fits_SG.argmax(1), each_SG.argmin(1))
    split = int((heads_S + slope_G[g_S] * len_S).sum())
    return Candidate(choice_S, int(job.whole_S.sum() - job.whole_S[long].sum()) + split)
