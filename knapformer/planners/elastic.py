"""The elastic planner: every sequence chooses its own degree and its own ranks, and rank sets may overlap.

S sequences, G degrees.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from knapformer.layout import bag_layouts
from knapformer.plan import RoutingPlan
from knapformer.planners.bench import Bench, Job
from knapformer.planners.placing import place
from knapformer.planners.repair import even
from knapformer.planners.static import plan_home, plan_static
from knapformer.workload import WorkloadModel

# A plan within 1/100 of the bound is not worth more goals than one; others try a few.
NEAR, ROUNDS = 100, 3
# No other layout can beat a plan within 1/200 of the bound by more; else they compete.
CLOSE, MOST_MIXED = 200, 64


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
    if max(job.home_load_R) <= job.goal and max(job.home_tokens_R) <= job.cap:
        return plan_home(len_S, home_S, ranks=ranks)
    best = _multifit(job)
    if best and max(best.load_R) <= job.bound + job.bound // CLOSE:
        return _plan(best, home_S)
    plans = [_plan(best, home_S)] if best else []
    plans += _fixed_plans(job, len_S, home_S, heads, cost, domain)
    able = [plan for plan in plans if plan.peak_tokens() <= job.cap]
    return min(able, key=lambda plan: plan.seconds(cost), default=None)


def _multifit(job: Job) -> Bench | None:
    """Search for the goal; where the bound is out of reach, for goals between it and the best so far.

    As MULTIFIT does for scheduling (Coffman, Garey and Johnson, 1978): packing well needs a goal that exists.
    """
    best = _search(job)
    low = job.bound
    for _ in range(ROUNDS):
        if best is None or max(best.load_R) <= job.bound + job.bound // NEAR:
            break
        goal = (low + max(best.load_R)) // 2
        again = _search(replace(job, goal=goal))
        if again and max(again.load_R) < max(best.load_R):
            best = again
        if max(best.load_R) > goal:
            low = goal
    return best


def _search(job: Job) -> Bench | None:
    """The best of a fixed number of candidates: evenly loaded and hedged, else as near to it as one comes."""
    best: tuple[tuple[int, int], Bench] | None = None
    for turn, (choice_S, total) in enumerate(_candidates(job)):
        if best is not None and total >= max(best[1].load_R) * job.ranks:
            continue
        bench = Bench(job)
        if not place(bench, choice_S):
            continue
        bench = _evened(bench)
        slow = max(0, max(bench.load_R) - job.goal)
        shaky = max(0, max(map(bench.excess_of, range(job.ranks))))
        if max(bench.tokens_R) <= job.cap and (best is None or (slow, shaky) < best[0]):
            best = (slow, shaky), bench
        # Later candidates split more: worth it to be in time, not for the hedge alone, nor for its time.
        if best and best[0][0] == 0 and (best[0][1] == 0 or turn * max(64, job.ranks) >= 5 * 64):
            break
    return best[1] if best else None


def _evened(bench: Bench) -> Bench:
    """First as fast as can be; then, if that reached the goal, hedged without leaving it."""
    even(bench, 4 * bench.job.ranks + 64)
    bench.hedged = True
    shaky = max(map(bench.excess_of, range(bench.job.ranks)))
    if max(bench.load_R) > bench.goal or shaky <= 0:
        return bench
    plain = bench.copy()
    even(bench, 2 * bench.job.ranks)
    return plain if max(bench.load_R) > bench.goal else bench


def _candidates(job: Job) -> Iterator[tuple[np.ndarray, int]]:
    """Choices of degrees, and what they cost in sum; those last that no placement could hedge."""
    tried, later = set(), []
    for most, heads in _limits(job):
        choice_S, total = _degrees(job, most, heads)
        if choice_S.tobytes() in tried:
            continue
        tried.add(choice_S.tobytes())
        if (job.heads_S // np.array(job.degrees)[choice_S]).max() > job.room_up:
            later.append((choice_S, total))
        else:
            yield choice_S, total
    yield from later


def _limits(job: Job) -> Iterator[tuple[int, int]]:
    """The most work, and the most attention, that a shard may cost; from few splits to many."""
    # Where the cap binds, fine shards are what fits.
    tight = 3 * int(job.len_S.sum()) > 2 * job.cap * job.ranks
    for eighths in (2, 1, 3, 4, 5, 6, 7, 8) if tight else (8, 5, 7, 6, 4, 3, 2, 1):
        yield job.goal * eighths // 8, 8 * job.goal
        if eighths == 8:
            yield job.goal, max(sum(job.home_heads_R) * 19 // (20 * job.ranks), job.room_up // 2)


def _degrees(job: Job, most: int, heads: int) -> tuple[np.ndarray, int]:
    """[S] index of the least degree whose even shards stay under both limits, else of the cheapest shards.

    Also returns what all sequences then cost in sum.
    """
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
    return choice_S, sum(job.home_load_R) - int(job.whole_S[long].sum()) + split


def _fixed_plans(
    job: Job, len_S: np.ndarray, home_S: np.ndarray, heads: int, cost: WorkloadModel, domain: int
) -> Iterator[RoutingPlan]:
    """What other layouts would do; mixed bags only where there are not too many to try."""
    yield plan_home(len_S, home_S, ranks=job.ranks)
    for layout in bag_layouts(job.ranks, job.degrees, domain):
        if job.ranks <= MOST_MIXED or "+" not in layout:
            yield plan_static(
                len_S, home_S, ranks=job.ranks, layout=layout, heads=heads, cost=cost, domain=domain
            )


def _plan(bench: Bench, home_S: np.ndarray) -> RoutingPlan:
    host_P, seq_P, len_P = (np.array(x, np.int64) for x in (bench.host, bench.seq, bench.tokens))
    used = host_P >= 0
    return RoutingPlan.of_pieces(bench.job.ranks, home_S, seq_P[used], len_P[used], host_P[used])
