"""The plan of one step: which rank hosts which part of which sequence.

C chunks, S sequences, R ranks.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """Chunk c is the next len_C[c] tokens of sequence seq_C[c], travelling from rank home_C[c] to host_C[c].

    Chunks are numbered by (home, sequence, shard). So the order in which a rank holds its own tokens before
    routing, and the order in which a host receives them, are both chunk order, and the chunks of one sequence
    are neighbours. A sequence held whole has one chunk; one split over g ranks has g, on g different hosts.
    """

    n_ranks: int
    seq_C: np.ndarray
    len_C: np.ndarray
    home_C: np.ndarray
    host_C: np.ndarray

    def first_C(self) -> np.ndarray:
        """[C] bool: chunk is the first of its sequence."""
        return np.diff(self.seq_C, prepend=-1) != 0

    def offset_C(self) -> np.ndarray:
        """[C] tokens of the same sequence that precede the chunk."""
        before_C = np.cumsum(self.len_C) - self.len_C
        return before_C - before_C[self.first_C()][np.cumsum(self.first_C()) - 1]

    def degree_C(self) -> np.ndarray:
        """[C] number of chunks that the chunk's sequence is split into."""
        return np.bincount(self.seq_C)[self.seq_C] if len(self.seq_C) else np.zeros(0, np.int64)

    def overlap_C(self, begin_S: np.ndarray, end_S: np.ndarray) -> np.ndarray:
        """[C] how many of the chunk's tokens lie in [begin_S, end_S) of its sequence, e.g. in its text."""
        start_C = self.offset_C()
        low_C = np.maximum(start_C, begin_S[self.seq_C])
        high_C = np.minimum(start_C + self.len_C, end_S[self.seq_C])
        return np.maximum(high_C - low_C, 0)

    def table_RR(self, rows_C: np.ndarray) -> np.ndarray:
        """[home, host] sums of rows_C: row r is what rank r sends, column r what it receives."""
        table_RR = np.zeros((self.n_ranks, self.n_ranks), np.int64)
        np.add.at(table_RR, (self.home_C, self.host_C), rows_C)
        return table_RR

    def tokens_RR(self) -> np.ndarray:
        """[home, host] token counts."""
        return self.table_RR(self.len_C)

    def tokens_R(self) -> np.ndarray:
        """[R] tokens hosted by each rank."""
        return self.tokens_RR().sum(0)
