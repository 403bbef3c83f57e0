"""The elastic planner's candidates: ways to split the sequences of a batch, to be placed and judged.

S sequences, G degrees, B bags.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from knapformer.planners.job import Job


@dataclass(frozen=True)
class Candidate:
    """How to split: indices of degrees, and what all sequences then cost in sum.

    hosts_of: the ranks of every split sequence, where they are not to be sought.
    """

    choice_S: np.ndarray
    total: int
    hosts_of: dict[int, list[int]] | None = None


def candidates(job: Job) -> Iterator[Candidate]:
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
    """By limits to the cost and to the attention of a shard, and by bags."""
    # Where the cap binds, fine shards are what fits.
    tight = 3 * int(job.len_S.sum()) > 2 * job.cap * job.ranks
    # Inside 8 ranks a bag is all of them: first come finer shards, which send less and are tried in no time.
    bags_after = 0 if tight else 4 if job.ranks <= 8 else 1
    for turn, eighths in enumerate((2, 1, 3, 4, 5, 6, 7, 8) if tight else (8, 5, 7, 6, 4, 3, 2, 1)):
        yield least_degrees(job, job.goal * eighths // 8, 8 * job.goal)
        if eighths == 8:
            heads = max(int(job.heads_S.sum()) * 19 // (20 * job.ranks), job.room_up // 2)
            yield least_degrees(job, job.goal, heads)
        if turn == bags_after:
            yield from (bagged(job, job.goal // parts) for parts in (2, 4, 8))


def least_degrees(job: Job, most: int, heads: int) -> Candidate:
    """Least degrees whose even shards stay under both limits, or else those of the cheapest shards."""
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


def bagged(job: Job, most: int) -> Candidate:
    """Splits what costs more than `most` over whole bags, costliest first, where it leaves least attention.

    The bags are few, large and fill the ranks: attention is even inside each, and with many sequences to a
    bag nearly so between them. What sends most, and hardly ever fails.
    """
    bags = _bags(job)
    held_B, degree_B = [0] * len(bags), [job.degrees.index(len(bag)) for bag in bags]
    choice_S, hosts_of, total = np.zeros(len(job.len_S), np.int64), {}, int(job.whole_S.sum())
    long = np.flatnonzero((job.whole_S > most) | (job.len_S > job.cap))
    for seq in long[np.argsort(-job.whole_S[long], kind="stable")].tolist():
        tokens, heads = int(job.len_S[seq]), int(job.heads_S[seq])
        able = []
        for b, (bag, g) in enumerate(zip(bags, degree_B, strict=True)):
            share = -(-tokens // len(bag))
            fits = share <= job.cap and heads // len(bag) + job.slopes[g] * share <= job.goal
            if fits and len(bag) <= tokens:
                able.append(((held_B[b] + heads) // len(bag), b))
        if able:
            _, b = min(able)
            held_B[b] += heads
            choice_S[seq], hosts_of[seq] = degree_B[b], bags[b]
            total += heads + job.slopes[degree_B[b]] * tokens - int(job.whole_S[seq])
    return Candidate(choice_S, total, hosts_of)


def _bags(job: Job) -> list[list[int]]:
    """From the first rank of every block on, as large as degrees allow."""
    bags, first = [], 0
    while first < job.ranks:
        left = bisect_right(job.block_R, job.block_R[first]) - first
        size = max(degree for degree in job.degrees if degree <= left)
        bags.append(list(range(first, first + size)))
        first += size
    return bags
