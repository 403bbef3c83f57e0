"""Layouts that fix where work may go before any length is known: `none`, and the paper's compute bags.

S sequences, P pieces.
"""

import heapq
import math

import numpy as np

from knapformer.layout import divisors, replica_bags
from knapformer.plan import RoutingPlan, even_shards
from knapformer.workload import WorkloadModel, integer_units


def plan_home(len_S: np.ndarray, home_S: np.ndarray, *, ranks: int) -> RoutingPlan:
    """Every sequence whole where it was loaded."""
    return RoutingPlan.of_pieces(ranks, home_S, np.arange(len(len_S)), len_S, home_S)


def plan_static(
    len_S: np.ndarray,
    home_S: np.ndarray,
    *,
    ranks: int,
    layout: str,
    heads: int,
    cost: WorkloadModel,
    domain: int,
) -> RoutingPlan:
    """Greedy knapsack over fixed bags (Zhang et al., arXiv 2508.06001), in every replica on its own.

    Sequences in descending work go to the least occupied of the bags that could hold them if empty, else to
    the least occupied of the largest kind. The bag's ranks share the sequence evenly, taking turns with odd
    tokens. One with fewer tokens than its bag has ranks is split by the largest divisor of the heads that its
    tokens allow, over the first ranks of the bag.
    """
    replicas = replica_bags(layout, ranks=ranks, heads=heads, domain=domain)
    width = ranks // len(replicas)
    (work_S,) = integer_units(cost.work(len_S))
    first_S, degree_S = np.zeros(len(len_S), np.int64), np.ones(len(len_S), np.int64)
    for replica, bags in enumerate(replicas):
        own = np.flatnonzero(home_S // width == replica)
        for seq, bag in zip(own, _assign(len_S[own], work_S[own], bags), strict=True):
            first_S[seq], degree_S[seq] = bags[bag][0], len(bags[bag])
    largest_fit = np.array([max(d for d in divisors(heads) if d <= n) for n in range(1, domain + 1)])
    degree_S = np.where(len_S < degree_S, largest_fit[np.minimum(len_S, domain) - 1], degree_S)
    seq_P, shard_P, len_P = even_shards(len_S, degree_S, _turns(len_S, degree_S, first_S))
    return RoutingPlan.of_pieces(ranks, home_S, seq_P, len_P, first_S[seq_P] + shard_P)


def _turns(len_S: np.ndarray, degree_S: np.ndarray, first_S: np.ndarray) -> np.ndarray:
    """[S] at which shard the odd tokens of a sequence begin: where its predecessor's in the bag ended."""
    by_bag = np.argsort(first_S, kind="stable")
    odd_S = (len_S % degree_S)[by_bag]
    before_S = np.cumsum(odd_S) - odd_S
    starts_S = np.diff(first_S[by_bag], prepend=-1) != 0
    turn_S = np.zeros(len(len_S), np.int64)
    turn_S[by_bag] = before_S - before_S[starts_S][np.cumsum(starts_S) - 1] if len(len_S) else 0
    return turn_S % degree_S


def _assign(len_S: np.ndarray, work_S: np.ndarray, bags: list[range]) -> list[int]:
    """The bag of each sequence of one replica."""
    ranks = sum(map(len, bags))
    total = sum(work_S.tolist())
    kinds = sorted({len(bag) for bag in bags})
    # Occupancy is work per rank of the bag; a common denominator keeps the comparison between kinds exact.
    scale = math.lcm(*kinds)
    heaps = {kind: [(0, i) for i, bag in enumerate(bags) if len(bag) == kind] for kind in kinds}
    bag_S = [0] * len(len_S)
    lens, works = len_S.tolist(), work_S.tolist()
    for seq in np.argsort(-work_S, kind="stable").tolist():
        able = [kind for kind in kinds if total * kind >= works[seq] * ranks and lens[seq] >= kind]
        occupied, bag, kind = min((*heaps[kind][0], kind) for kind in able or kinds[-1:])
        heapq.heapreplace(heaps[kind], (occupied + works[seq] * (scale // kind), bag))
        bag_S[seq] = bag
    return bag_S
