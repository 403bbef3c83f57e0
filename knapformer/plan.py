"""The plan of one step: which rank hosts which part of which sequence.

C chunks, S sequences, R ranks.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from knapformer.layout import split_degrees
from knapformer.workload import WorkloadModel


def even_shards(
    len_S: np.ndarray, degree_S: np.ndarray, turn_S: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequence, shard and tokens of pieces of evenly split sequences; shard turn_S has the first odd token.

    Pieces are in order of sequence and shard.
    """
    seq_P = np.repeat(np.arange(len(len_S)), degree_S)
    shard_P = np.arange(len(seq_P)) - np.repeat(np.cumsum(degree_S) - degree_S, degree_S)
    after_turn_P = (shard_P - turn_S[seq_P]) % degree_S[seq_P]
    return seq_P, shard_P, len_S[seq_P] // degree_S[seq_P] + (after_turn_P < (len_S % degree_S)[seq_P])


CHUNK_ARRAYS = ("seq_C", "len_C", "home_C", "host_C")


@dataclass(frozen=True, eq=False)
class RoutingPlan:
    """Chunk c is the next len_C[c] tokens of sequence seq_C[c], travelling from rank home_C[c] to host_C[c].

    Chunks are numbered by (home, sequence, shard). So the order in which a rank holds its own tokens before
    routing, and the order in which a host receives them, are both chunk order, and the chunks of one sequence
    are neighbours. A sequence held whole has one chunk; one split over g ranks has g, on g different hosts.
    The arrays are int64 and read-only.
    """

    n_ranks: int
    seq_C: np.ndarray
    len_C: np.ndarray
    home_C: np.ndarray
    host_C: np.ndarray

    def __post_init__(self) -> None:
        # Ranks share a plan as they share the batch: nobody may change it under the others.
        for name in CHUNK_ARRAYS:
            array_C = np.asarray(getattr(self, name), np.int64).view()
            array_C.setflags(write=False)
            object.__setattr__(self, name, array_C)

    @classmethod
    def of_pieces(
        cls, n_ranks: int, home_S: np.ndarray, seq_P: np.ndarray, len_P: np.ndarray, host_P: np.ndarray
    ) -> "RoutingPlan":
        """The plan of pieces given in any order of sequences, the shards of each sequence in theirs."""
        order = np.lexsort((seq_P, home_S[seq_P]))
        seq_C = np.asarray(seq_P, np.int64)[order]
        len_C, host_C = (np.asarray(x_P, np.int64)[order] for x_P in (len_P, host_P))
        return cls(n_ranks, seq_C, len_C, np.asarray(home_S, np.int64)[seq_C], host_C)

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
        tokens_R = np.zeros(self.n_ranks, np.int64)
        np.add.at(tokens_R, self.host_C, self.len_C)
        return tokens_R

    def peak_tokens(self) -> int:
        """Tokens on the fullest rank."""
        return int(self.tokens_R().max())

    def total_C(self) -> np.ndarray:
        """[C] tokens of the chunk's whole sequence."""
        if not len(self.seq_C):
            return np.zeros(0, np.int64)
        sum_S = np.zeros(self.seq_C.max() + 1, np.int64)
        np.add.at(sum_S, self.seq_C, self.len_C)
        return sum_S[self.seq_C]

    def work_R(self, cost: WorkloadModel) -> np.ndarray:
        """[R] compute of each rank, without traffic, in the unit of `cost`."""
        work_C = cost.chunk_work(self.len_C, self.total_C(), self.degree_C())
        return np.bincount(self.host_C, work_C, minlength=self.n_ranks)

    def max_over_mean(self, cost: WorkloadModel) -> float:
        """Work of the busiest rank over the mean: 1 is balanced, and so is a step without any work."""
        work_R = self.work_R(cost)
        return float(work_R.max() / work_R.mean()) if len(self.seq_C) else 1.0

    def near_C(self, node: int) -> np.ndarray:
        """[C] other chunks of the same sequence whose hosts are in the same node of `node` ranks."""
        place_C = self.seq_C * -(-self.n_ranks // node) + self.host_C // node
        _, which_C, count = np.unique(place_C, return_inverse=True, return_counts=True)
        return count[which_C] - 1

    def seconds_R(self, cost: WorkloadModel) -> np.ndarray:
        """[R] compute plus attention traffic of each rank."""
        alike = cost.traffic == cost.traffic_across
        near_C = None if alike else self.near_C(cost.node)
        seconds_C = cost.chunk_seconds(self.len_C, self.total_C(), self.degree_C(), near_C)
        return np.bincount(self.host_C, seconds_C, minlength=self.n_ranks)

    def seconds(self, cost: WorkloadModel) -> float:
        """Predicted time of the step: that of the slowest rank."""
        return float(self.seconds_R(cost).max())

    def lower_bound(self, cost: WorkloadModel, *, heads: int, domain: int = 8) -> float:
        """Predicted seconds that no plan of the same sequences can beat (`WorkloadModel.lower_bound`)."""
        len_S = self.total_C()[self.first_C()]
        return cost.lower_bound(len_S, self.n_ranks, split_degrees(heads, self.n_ranks, domain))

    def gap(self, cost: WorkloadModel, *, heads: int, domain: int = 8) -> float:
        """By which share the predicted seconds exceed the lower bound."""
        bound = self.lower_bound(cost, heads=heads, domain=domain)
        return self.seconds(cost) / bound - 1.0 if bound else 0.0

    def _share(self, tokens_C: np.ndarray) -> float:
        return float(tokens_C.sum() / self.len_C.sum()) if len(self.len_C) else 0.0

    def moved(self) -> float:
        """Share of all tokens that leave their home rank at routing."""
        return self._share(self.len_C * (self.home_C != self.host_C))

    def crossed(self, node: int) -> float:
        """Share of all tokens whose home and host lie in different nodes of `node` ranks."""
        return self._share(self.len_C * (self.home_C // node != self.host_C // node))

    def attention_sent(self) -> float:
        """Share of all tokens that leave their rank in one attention all-to-all, (g-1)/g of a chunk."""
        degree_C = self.degree_C()
        return self._share(self.len_C * (degree_C - 1) / degree_C)

    def to_dict(self) -> dict[str, Any]:
        """Plain integers and lists, for JSON."""
        return {"n_ranks": int(self.n_ranks), **{name: getattr(self, name).tolist() for name in CHUNK_ARRAYS}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RoutingPlan":
        """The plan that `to_dict` wrote; ValueError names what makes the values no plan."""
        if not isinstance(values, dict) or set(values) != {"n_ranks", *CHUNK_ARRAYS}:
            given = sorted(values) if isinstance(values, dict) else values
            raise ValueError(f"a plan has the keys n_ranks, {', '.join(CHUNK_ARRAYS)}, not {given}")
        n_ranks = values["n_ranks"]
        if type(n_ranks) is not int or n_ranks < 1:
            raise ValueError(f"n_ranks {n_ranks!r} of a plan must be a whole number of at least 1")
        arrays = {name: _whole_numbers(name, values[name]) for name in CHUNK_ARRAYS}
        if len({len(array_C) for array_C in arrays.values()}) > 1:
            sizes = ", ".join(f"{len(array_C)} {name}" for name, array_C in arrays.items())
            raise ValueError(f"the arrays of a plan must be of one size, not {sizes}")
        plan = cls(n_ranks=n_ranks, **arrays)
        plan.check()
        return plan

    def check(self) -> None:
        """ValueError unless chunks are in order, not empty, and those of a sequence on distinct ranks."""
        least = {"seq_C": 0, "len_C": 1, "home_C": 0, "host_C": 0}
        for name, low in least.items():
            array_C = getattr(self, name)
            high = self.n_ranks - 1 if name in ("home_C", "host_C") else np.iinfo(np.int64).max
            for c in np.flatnonzero((array_C < low) | (array_C > high))[:1]:
                raise ValueError(f"chunk {c} of the plan has {name[:-2]} {array_C[c]}, not {low} to {high}")
        order_C = np.lexsort((self.seq_C, self.home_C))
        for c in np.flatnonzero(order_C != np.arange(len(order_C)))[:1]:
            raise ValueError(f"chunk {c} of the plan is out of order: chunks go by home, then by sequence")
        change_C = self.first_C() | (np.diff(self.home_C, prepend=-1) != 0)
        if change_C.sum() > len(np.unique(self.seq_C)):
            raise ValueError("a sequence of the plan has two homes; it is loaded by one rank")
        if len(np.unique(np.stack([self.seq_C, self.host_C]), axis=1).T) < len(self.seq_C):
            raise ValueError("two chunks of one sequence of the plan have the same host; join them")

    def to_json(self) -> str:
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "RoutingPlan":
        """The plan that `to_json` wrote; ValueError names what makes the text no plan."""
        return cls.from_dict(json.loads(text))


def _whole_numbers(name: str, values: Any) -> np.ndarray:
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ValueError(f"{name} of a plan must be a list of whole numbers")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise ValueError(f"{name} of a plan must hold numbers below 2^63") from None
