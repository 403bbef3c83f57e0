"""Random plans of every kind that an elastic planner may return, for laws that hold for all of them."""

import numpy as np

from knapformer.plan import RoutingPlan


def random_plan(rng: np.random.Generator, ranks: int, domain: int, most_tokens: int = 40) -> RoutingPlan:
    """Degrees 1 to 4 with overlapping hosts inside domains; idle ranks, one-token sequences, empty plans."""
    busy = rng.random(ranks) < rng.choice([0.5, 0.8, 1.0])
    pools = [np.flatnonzero(busy[d : d + domain]) + d for d in range(0, ranks, domain)]
    pools = [pool for pool in pools if len(pool)]
    n_sequences = int(rng.integers(0, 3 * ranks + 1)) if pools else 0
    home_S = rng.integers(0, ranks, n_sequences)
    most_degree = int(rng.choice([1, 4, 4, 4]))
    chunks = []
    for seq in np.lexsort((np.arange(n_sequences), home_S)):
        pool = pools[rng.integers(len(pools))]
        length = 1 if rng.random() < 0.2 else int(rng.integers(1, most_tokens + 1))
        degree = int(rng.integers(1, min(most_degree, len(pool), length) + 1))
        cuts = np.sort(rng.choice(np.arange(1, length), degree - 1, replace=False)) if degree > 1 else []
        lens = np.diff([0, *cuts, length])
        hosts = rng.choice(pool, degree, replace=False)
        chunks += [(seq, n, home_S[seq], host) for n, host in zip(lens, hosts, strict=True)]
    columns = np.array(chunks, np.int64).reshape(-1, 4).T
    return RoutingPlan(ranks, *columns)


def rows_of(rank_C: np.ndarray, rank: int, rows_C: np.ndarray) -> np.ndarray:
    """[all rows in chunk order] bool: the row's chunk is the rank's."""
    return np.repeat(rank_C == rank, rows_C)
