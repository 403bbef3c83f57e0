"""Stacks of work: what each rank (or each group of ranks, on large clusters) has to do, and of which source.

C chunks, B blocks to draw, R ranks, K columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from knapformer import RoutingPlan, WorkloadModel
from knapformer_cli.profile.mix import Batch

MOST_RANKS = 64  # beyond, ranks are sorted by work and drawn in groups
COLUMNS = 64
FEWEST = 8  # columns that there is room for


@dataclass(frozen=True, eq=False)
class Blocks:
    """B blocks on K columns; heights are work over the mean rank's."""

    columns: int
    column_B: np.ndarray
    bottom_B: np.ndarray
    height_B: np.ndarray
    source_B: np.ndarray
    split_B: np.ndarray
    words_B: list[str]
    slowest: int  # column of the busiest rank
    rank: int  # that rank
    most: float  # its work over the mean

    @property
    def grouped(self) -> bool:
        """Whether a column is a group of ranks."""
        return len(self.words_B) == 0

    def words_of(self, split: bool) -> list[str]:
        """What the blocks that are, or are not, parts of split sequences say."""
        return [self.words_B[block] for block in np.flatnonzero(self.split_B == split)]


def rank_blocks(
    plans: Sequence[RoutingPlan], batch: Batch, cost: WorkloadModel, sources: Sequence[str]
) -> Blocks:
    """Every chunk a block on its host, split ones lowest, then the larger ones."""
    n_ranks = plans[0].n_ranks
    seq_C, _, host_C, work_C, split_C = chunk_columns(plans, cost)
    len_C, degree_C = (np.concatenate(x) for x in ([p.len_C for p in plans], [p.degree_C() for p in plans]))
    work_R = np.bincount(host_C, work_C, minlength=n_ranks)
    mean = work_R.mean()
    rank = int(work_R.argmax())
    source_C = batch.source_S[seq_C]
    if n_ranks > MOST_RANKS:
        return _grouped(work_R, host_C, work_C, source_C, rank)
    order = np.lexsort((seq_C, -work_C, source_C, ~split_C, host_C))
    height_B = work_C[order] / mean
    words_B = [
        f"rank {host}: {tokens:,} of {total:,} tokens, {sources[source]}"
        + (f", split over {degree} ranks" if degree > 1 else "")
        for host, tokens, total, source, degree in zip(
            *(x[order].tolist() for x in (host_C, len_C, batch.len_S[seq_C], source_C, degree_C)), strict=True
        )
    ]
    return Blocks(
        columns=n_ranks,
        column_B=host_C[order],
        bottom_B=stacked(host_C[order], height_B),
        height_B=height_B,
        source_B=source_C[order],
        split_B=split_C[order],
        words_B=words_B,
        slowest=rank,
        rank=rank,
        most=float(work_R[rank] / mean),
    )


def chunk_columns(plans: Sequence[RoutingPlan], cost: WorkloadModel) -> tuple[np.ndarray, ...]:
    """[C] sequence, home, host, work, and whether it is a part of a split one, over all micro-steps."""
    columns = []
    for plan in plans:
        degree_C = plan.degree_C()
        work_C = cost.chunk_work(plan.len_C, plan.total_C(), degree_C)
        columns.append((plan.seq_C, plan.home_C, plan.host_C, work_C, degree_C > 1))
    return tuple(np.concatenate(column) for column in zip(*columns, strict=True))


def stacked(column_B: np.ndarray, height_B: np.ndarray) -> np.ndarray:
    """[B] the bottom of each block on those before it in its column; blocks come column by column."""
    first_B = np.diff(column_B, prepend=-1) != 0
    before_B = np.cumsum(height_B) - height_B
    return before_B - before_B[first_B][np.cumsum(first_B) - 1]


def _grouped(
    work_R: np.ndarray, host_C: np.ndarray, work_C: np.ndarray, source_C: np.ndarray, rank: int
) -> Blocks:
    """Ranks sorted by work, busiest first, in COLUMNS groups; a block is a source's mean work in a group."""
    n_ranks, n_sources = len(work_R), int(source_C.max()) + 1
    place_R = np.empty(n_ranks, np.int64)
    place_R[np.argsort(-work_R, kind="stable")] = np.arange(n_ranks) * COLUMNS // n_ranks
    table_KS = np.zeros((COLUMNS, n_sources))
    np.add.at(table_KS, (place_R[host_C], source_C), work_C)
    table_KS /= np.bincount(place_R, minlength=COLUMNS)[:, None] * work_R.mean()
    bottom_KS = np.cumsum(table_KS, 1) - table_KS
    column_B, source_B = (x.ravel() for x in np.indices(table_KS.shape))
    return Blocks(
        columns=COLUMNS,
        column_B=column_B,
        bottom_B=bottom_KS.ravel(),
        height_B=table_KS.ravel(),
        source_B=source_B,
        split_B=np.zeros(table_KS.size, bool),
        words_B=[],
        slowest=0,
        rank=rank,
        most=float(work_R[rank] / work_R.mean()),
    )
