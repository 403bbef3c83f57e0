"""The elastic planner: every sequence chooses its own degree and its own ranks, and rank sets may overlap.

S sequences, P pieces.
"""

import numpy as np

from knapformer.layout import split_degrees
from knapformer.plan import RoutingPlan, even_shards
from knapformer.workload import WorkloadModel, integer_units


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
    """Longest first, to the least loaded ranks; split by the least degree whose pieces fit under the mean."""
    degrees = split_degrees(heads, ranks, domain)
    units = integer_units(*(cost.seconds(len_S, degree) for degree in degrees))
    mean = int(units[0].sum()) // ranks + 1
    load = [0] * ranks
    degree_S = np.ones(len(len_S), np.int64)
    hosts: list[list[int]] = [[] for _ in range(len(len_S))]
    blocks = [range(first, min(first + domain, ranks)) for first in range(0, ranks, domain)]
    for seq in np.lexsort((np.arange(len(len_S)), -units[0])).tolist():
        choices = [i for i, d in enumerate(degrees) if units[i][seq] <= mean and d <= len_S[seq]] or [0]
        degree = degrees[choices[0]]
        work = int(units[choices[0]][seq])
        sets = [sorted(block, key=lambda r: (load[r], r != home_S[seq], r))[:degree] for block in blocks]
        hosts[seq] = min((s for s in sets if len(s) == degree), key=lambda s: load[s[-1]])
        degree_S[seq] = degree
        for rank in hosts[seq]:
            load[rank] += work
    seq_P, _, len_P = even_shards(len_S, degree_S)
    host_P = np.array([rank for ranks_of in hosts for rank in ranks_of], np.int64)
    plan = RoutingPlan.of_pieces(ranks, home_S, seq_P, len_P, host_P)
    return plan if max_tokens is None or plan.peak_tokens() <= max_tokens else None
