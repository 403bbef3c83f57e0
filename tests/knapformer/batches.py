"""Batches of every kind for the laws of plans, and the partition law itself."""

import numpy as np
from hypothesis import strategies as st

from knapformer import RoutingPlan, WorkloadModel

COST = WorkloadModel.analytic()
# Seconds of a forward block at 400 TFLOP/s; four bf16 rows a token over 150 GB/s in a node, 50 outside.
TRAFFIC = WorkloadModel(
    linear=COST.linear / 4e14,
    quadratic=COST.quadratic / 4e14,
    traffic=4 * 2 * 3072 / 150e9,
    traffic_across=4 * 2 * 3072 / 50e9,
)


@st.composite
def batches(draw, max_ranks: int = 64) -> tuple[np.ndarray, np.ndarray, int]:
    """(len_S, home_S, ranks): pictures, clips, one token, all equal, one giant; idle ranks; any order."""
    ranks = draw(st.integers(1, max_ranks))
    count = draw(st.integers(0, 4 * ranks))
    kind = draw(st.sampled_from(["any", "tiny", "equal", "giant", "mixed"]))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    lens = {
        "any": generator.integers(1, 30_000, count),
        "tiny": generator.integers(1, 4, count),
        "equal": np.full(count, generator.integers(1, 5000)),
        "giant": np.append(generator.integers(1, 600, max(count - 1, 0)), generator.integers(1, 500_000)),
        "mixed": generator.choice([300, 1220, 4290, 16_600, 25_800], count)
        + generator.integers(0, 393, count),
    }[kind]
    homes = generator.integers(0, ranks, len(lens))
    if draw(st.booleans()):
        homes = np.minimum(homes, draw(st.integers(0, ranks - 1)))  # the upper ranks have nothing at home
    return lens.astype(np.int64), homes.astype(np.int64), ranks


def is_partition(plan: RoutingPlan, lens: np.ndarray, homes: np.ndarray, *, heads: int, domain: int) -> None:
    """Every token hosted once, chunks in order, shards on different ranks of one domain, heads divisible."""
    chunks = len(plan.seq_C)
    assert all(len(x) == chunks for x in (plan.len_C, plan.home_C, plan.host_C))
    assert (plan.len_C > 0).all() and (plan.host_C >= 0).all() and (plan.host_C < plan.n_ranks).all()
    assert (np.bincount(plan.seq_C, plan.len_C, minlength=len(lens)) == lens).all()
    assert (plan.home_C == homes[plan.seq_C]).all()
    order = np.lexsort((np.arange(chunks), plan.seq_C, plan.home_C))
    assert (order == np.arange(chunks)).all(), "chunks are numbered by home, then sequence"
    assert (heads % plan.degree_C() == 0).all() if chunks else True
    pairs = set(zip(plan.seq_C.tolist(), plan.host_C.tolist(), strict=True))
    assert len(pairs) == chunks, "shards of one sequence on different ranks"
    blocks = set(zip(plan.seq_C.tolist(), (plan.host_C // domain).tolist(), strict=True))
    assert len(blocks) == len(lens), "one domain a sequence"
