"""The elastic planner: every sequence chooses its own degree and its own ranks, and rank sets may overlap.

S sequences, G degrees.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from knapformer.layout import bag_layouts, parse_bags
from knapformer.plan import RoutingPlan
from knapformer.planners.bench import Bench
from knapformer.planners.candidates import least_degrees
from knapformer.planners.dealing import deal
from knapformer.planners.job import TOLERANCE, Job
from knapformer.planners.search import rating, search
from knapformer.planners.static import plan_home, plan_static
from knapformer.workload import WorkloadModel

# A plan within 1/100 of the bound is not worth more goals than one; others try a few.
NEAR, ROUNDS = 100, 3
# Ranks up to which all specs of two kinds of bags compete.
MOST_MIXED = 64
# Blocks that are planned again with another one.
MERGES = 8


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
    """Least predicted seconds, then fewest tokens moved; None where no candidate stays under max_tokens.

    Zellige (arXiv 2608.01150) shows why overlapping rank sets balance what disjoint bags cannot.
    """
    if not len(len_S):
        return RoutingPlan.of_pieces(ranks, home_S, len_S, len_S, len_S)
    job = Job.of(len_S, home_S, ranks=ranks, heads=heads, cost=cost, domain=domain, cap=max_tokens)
    if max(job.at_home.load_R) <= job.goal and max(job.at_home.tokens_R) <= job.cap:
        return plan_home(len_S, home_S, ranks=ranks)
    shares = _by_block(job)
    if shares and max(share.slowest for share in shares) <= job.close:
        return _plan(job, shares)
    best = _multifit(job)
    everything = [Share(np.arange(ranks), np.arange(len(len_S)), best)] if best else []
    if best and max(best.load_R) <= job.close:
        return _plan(job, everything)
    plans = [_plan(job, found) for found in (shares, everything) if found]
    seconds = min((plan.seconds(cost) for plan in plans), default=math.inf)
    plans += _fixed_plans(job, len_S, home_S, heads, cost, domain, seconds)
    able = [plan for plan in plans if plan.peak_tokens() <= job.cap]
    return min(able, key=lambda plan: plan.seconds(cost), default=None)


@dataclass(frozen=True, eq=False)
class Share:
    """Some blocks' ranks and sequences, by their numbers in the job, and how they lie."""

    rank_R: np.ndarray
    seq_S: np.ndarray
    bench: Bench

    @classmethod
    def of(cls, job: Job, rank_R: np.ndarray, seq_S: np.ndarray) -> "Share | None":
        bench = search(job.part(rank_R, seq_S))
        return cls(rank_R, seq_S, bench) if bench else None

    @property
    def slowest(self) -> int:
        return max(self.bench.load_R)


def _by_block(job: Job) -> list[Share]:
    """Every block planned on its own; one that misses its goals once more, together with the roomiest other.

    So a candidate that fails in one block costs the others nothing. Empty where there is nothing to divide,
    or where a block finds no plan under the cap.
    """
    choice_S = least_degrees(job, job.goal, 8 * job.goal).choice_S
    if job.block_R[-1] == 0 or not choice_S.any():
        return []
    block_S, block_R = deal(job, choice_S), np.array(job.block_R)
    shares = []
    for block in range(job.block_R[-1] + 1):
        share = Share.of(job, np.flatnonzero(block_R == block), np.flatnonzero(block_S == block))
        # All blocks at once are soon searched where they are few, and have more ways out.
        if share is None or (share.slowest > job.close and job.ranks <= MOST_MIXED):
            return []
        shares.append(share)
    shares.sort(key=lambda share: rating(share.bench))
    mended: list[Share] = []
    while len(shares) > 1 and len(mended) < MERGES and rating(shares[-1].bench) > (0, 0):
        poor = shares.pop()
        mate = shares.pop(min(range(len(shares)), key=lambda i: sum(shares[i].bench.load_R)))
        rank_R = np.sort(np.concatenate([poor.rank_R, mate.rank_R]))
        both = Share.of(job, rank_R, np.sort(np.concatenate([poor.seq_S, mate.seq_S])))
        better = both and rating(both.bench) < rating(poor.bench)
        mended += [both] if both and better else [poor, mate]
    return shares + mended


def _multifit(job: Job) -> Bench | None:
    """Search for the goal; where the bound is out of reach, for goals between it and the best so far.

    As MULTIFIT does for scheduling (Coffman, Garey and Johnson, 1978): packing well needs a goal that exists.
    """
    best = search(job)
    low = job.bound
    for _ in range(ROUNDS):
        if best is None or max(best.load_R) <= job.bound + job.bound // NEAR:
            break
        goal = (low + max(best.load_R)) // 2
        again = search(replace(job, goal=goal))
        if again and max(again.load_R) < max(best.load_R):
            best = again
        if max(best.load_R) > goal:
            low = goal
    return best


def _fixed_plans(
    job: Job, len_S: np.ndarray, home_S: np.ndarray, heads: int, cost: WorkloadModel, domain: int, best: float
) -> Iterator[RoutingPlan]:
    """What other layouts would do, but for those that cannot beat `best` seconds by more than 1/256.

    Mixed bags only where there are not too many to try.
    """
    yield plan_home(len_S, home_S, ranks=job.ranks)
    bounds: dict[tuple[int, ...], float] = {}
    for layout in bag_layouts(job.ranks, job.degrees, domain):
        if job.ranks > MOST_MIXED and "+" in layout:
            continue
        sizes = tuple(size for size, _ in parse_bags(layout))
        if sizes not in bounds:
            # Sequences shorter than a bag may be split by less.
            exact = len_S.min() >= sizes[-1]
            bounds[sizes] = cost.lower_bound(len_S, job.ranks, sizes) if exact else 0.0
        if bounds[sizes] < best - best / TOLERANCE:
            yield plan_static(
                len_S, home_S, ranks=job.ranks, layout=layout, heads=heads, cost=cost, domain=domain
            )


def _plan(job: Job, shares: list[Share]) -> RoutingPlan:
    columns = []
    for share in shares:
        host_P, seq_P, len_P = (
            np.array(x, np.int64) for x in (share.bench.host, share.bench.seq, share.bench.tokens)
        )
        used = host_P >= 0
        columns.append([share.seq_S[seq_P[used]], len_P[used], share.rank_R[host_P[used]]])
    return RoutingPlan.of_pieces(
        job.ranks, job.home_S, *(np.concatenate(x) for x in zip(*columns, strict=True))
    )
