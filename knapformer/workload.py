"""What a sequence costs the ranks that share it: compute and attention traffic.

S sequences, C chunks, N measurements.
"""

import itertools
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class WorkloadModel:
    """seconds(L, g) = linear * L/g + quadratic * L^2/g + traffic(L, g), on each of the g ranks that share L.

    The unit is whatever the coefficients are in: seconds after calibration, FLOP in the analytic form.
    Under Ulysses a rank keeps 1/g of its rows and sends the others to its g - 1 peers. `traffic` is the cost
    of one token leaving its rank for a peer in the same node of `node` ranks, `traffic_across` for another
    node, each summed over all attention all-to-alls of a step.
    """

    linear: float
    quadratic: float
    traffic: float = 0.0
    traffic_across: float = 0.0
    node: int = 8

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "traffic", "traffic_across"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"workload coefficient {name}={value} must be a finite number of at least 0")
        if self.linear + self.quadratic <= 0:
            raise ValueError("workload coefficients linear and quadratic are both 0; one must be positive")
        if self.node < 1:
            raise ValueError(f"workload node={self.node} must be at least 1 rank")

    @classmethod
    def analytic(cls, width: int = 3072, gamma: float = 0.49) -> "WorkloadModel":
        """FLOP of one DiT block forward, 24 L d^2 + gamma 4 L^2 d (Zhang et al., arXiv 2508.06001).

        gamma corrects for attention running at another share of the peak than the matrix products.
        """
        if width < 1 or not gamma >= 0:
            raise ValueError(f"width={width} must be at least 1 and gamma={gamma} at least 0")
        return cls(linear=24.0 * width * width, quadratic=gamma * 4.0 * width)

    @classmethod
    def fit(cls, len_N: ArrayLike, seconds_N: ArrayLike) -> "WorkloadModel":
        """a*L + b*L^2 through measured seconds of single sequences, with the least relative errors.

        Outliers count less, and no coefficient is below 0. ValueError without two lengths or with seconds
        that are not positive.
        """
        x_N, y_N = np.asarray(len_N, float), np.asarray(seconds_N, float)
        if x_N.shape != y_N.shape or len(np.unique(x_N)) < 2 or min(x_N.min(), y_N.min()) <= 0:
            raise ValueError(f"{x_N.size} measurements need positive seconds of at least 2 different lengths")
        linear, quadratic = _fit_relative(np.stack([x_N, x_N * x_N], 1), y_N)
        return cls(linear=linear, quadratic=quadratic)

    @classmethod
    def fit_steps(
        cls, tokens_N: ArrayLike, squares_N: ArrayLike, seconds_N: ArrayLike
    ) -> tuple["WorkloadModel", float]:
        """The model, and seconds that every step costs besides, through measured steps of packed chunks.

        `tokens_N` are the tokens of a step's chunks, `squares_N` the sum of L^2/g over their sequences.
        Fitted as `fit` is. ValueError without three different steps or with seconds that are not positive.
        """
        tokens_N, squares_N, y_N = (np.asarray(x, float) for x in (tokens_N, squares_N, seconds_N))
        terms_N3 = np.stack([tokens_N, squares_N, np.ones_like(y_N)], 1)
        if len(np.unique(terms_N3, axis=0)) < 3 or min(terms_N3.min(), y_N.min()) <= 0:
            raise ValueError(f"{y_N.size} measurements need positive seconds of at least 3 different steps")
        linear, quadratic, overhead = _fit_relative(terms_N3, y_N)
        return cls(linear=linear, quadratic=quadratic), overhead

    def work(self, len_S: ArrayLike, degree_S: ArrayLike = 1) -> np.ndarray:
        """[S] compute on each of degree_S ranks, without traffic."""
        return self.chunk_work(np.asarray(len_S, float) / degree_S, len_S, degree_S)

    def seconds(self, len_S: ArrayLike, degree_S: ArrayLike = 1) -> np.ndarray:
        """[S] compute plus traffic on each of degree_S ranks."""
        return self.chunk_seconds(np.asarray(len_S, float) / degree_S, len_S, degree_S)

    def chunk_work(self, len_C: ArrayLike, total_C: ArrayLike, degree_C: ArrayLike) -> np.ndarray:
        """[C] compute of a chunk of len_C of its sequence's total_C tokens.

        A rank works on its own tokens, and in attention on an equal share of the heads of the whole sequence.
        """
        total_C = np.asarray(total_C, float)
        return self.linear * np.asarray(len_C, float) + self.quadratic * total_C * total_C / degree_C

    def chunk_seconds(
        self, len_C: ArrayLike, total_C: ArrayLike, degree_C: ArrayLike, near_C: ArrayLike | None = None
    ) -> np.ndarray:
        """[C] compute of a chunk plus the traffic of its rows that leave the rank.

        near_C: how many of its degree_C - 1 peers are in its node; by default as many as a node has room for.
        """
        degree_C = np.asarray(degree_C, np.int64)
        near_C = np.minimum(degree_C, self.node) - 1 if near_C is None else np.asarray(near_C, np.int64)
        leaving_C = near_C * self.traffic + (degree_C - 1 - near_C) * self.traffic_across
        return self.chunk_work(len_C, total_C, degree_C) + np.asarray(len_C, float) * leaving_C / degree_C

    def lower_bound(self, len_S: ArrayLike, ranks: int, degrees: ArrayLike) -> float:
        """No plan of these sequences on `ranks` ranks that splits by `degrees` is predicted to be faster.

        The step lasts at least t if every sequence has a degree at which it needs at most t on its ranks, and
        the cheapest such degrees cost at most ranks * t in sum. Bisection finds the least such t.
        """
        len_S = np.asarray(len_S, np.int64)
        if not len(len_S):
            return 0.0
        degrees = np.asarray(degrees, np.int64)
        whole_S = self.seconds(len_S)
        mean = float(np.cumsum(whole_S)[-1]) / ranks
        if whole_S.max() <= mean:
            return mean
        each_SG = self.seconds(len_S[:, None], degrees[None, :])
        low = max(float(np.cumsum((each_SG * degrees).min(1))[-1]) / ranks, float(each_SG.min(1).max()))
        # Sequences that fit whole even at the lower end stay whole: only the others change with t.
        long_SG = each_SG[each_SG[:, 0] > low]
        rest = float(np.cumsum(each_SG[each_SG[:, 0] <= low, 0])[-1]) if len(long_SG) < len(len_S) else 0.0

        def fits(t: float) -> bool:
            spent_SG = np.where(long_SG <= t, long_SG * degrees, np.inf)
            return rest + (float(np.cumsum(spent_SG.min(1))[-1]) if len(spent_SG) else 0.0) <= ranks * t

        if fits(low):
            return low
        high = 2 * low
        while not fits(high):
            high *= 2
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return low

    def save(self, path: str | Path) -> None:
        """Write the coefficients as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "WorkloadModel":
        """Read coefficients written by `save`; ValueError names a file that holds anything else."""
        try:
            values = json.loads(Path(path).read_text())
            unknown = set(values) - {field.name for field in fields(cls)}
            if unknown:
                raise ValueError(f"unknown keys {sorted(unknown)}")
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"workload file {path} is not what WorkloadModel.save writes: {error}"
            ) from error


def _fit_relative(terms_NK: np.ndarray, y_N: np.ndarray, rounds: int = 20) -> list[float]:
    """[K] coefficients of at least 0 with the least relative errors, by Huber's weights (Huber, 1964).

    The median error scales them, so that a few disturbed measurements move nothing.
    """
    scale_K, n_terms = np.abs(terms_NK).max(0), terms_NK.shape[1]
    share_NK = terms_NK / scale_K / y_N[:, None]
    kept = [list(k) for n in range(1, n_terms + 1) for k in itertools.combinations(range(n_terms), n)]
    weight_N, best_K = np.ones_like(y_N), np.zeros(n_terms)
    for _ in range(rounds):
        root_N, least = np.sqrt(weight_N), math.inf
        # The best of all subsets of terms is the non-negative optimum; there are few of them.
        for columns in kept:
            found = np.linalg.lstsq(share_NK[:, columns] * root_N[:, None], root_N, rcond=None)[0]
            error = float((weight_N * (share_NK[:, columns] @ found - 1) ** 2).sum())
            if found.min() >= 0 and error < least:
                least, best_K = error, np.zeros(n_terms)
                best_K[columns] = found
        error_N = np.abs(share_NK @ best_K - 1)
        usual = 1.345 * 1.4826 * max(float(np.median(error_N)), 1e-12)
        weight_N = np.minimum(1, usual / np.maximum(error_N, usual))
    return [float(x) for x in best_K / scale_K]


def integer_units(*seconds: np.ndarray) -> list[np.ndarray]:
    """Costs as int64 on one scale, a power of two, the largest about 2^40.

    Their sums are exact in any order, so planners compare the same numbers on every machine.
    """
    largest = max((float(s.max()) for s in seconds if s.size), default=1.0)
    scale = 2.0 ** (40 - math.frexp(largest)[1])
    return [np.rint(s * scale).astype(np.int64) for s in seconds]
