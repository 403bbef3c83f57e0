"""From lengths and a layout's name to the plan of a step, or of as many micro-steps as memory needs.

S sequences.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike

from knapformer.layout import check_layout, parse_bags, split_degrees
from knapformer.plan import RoutingPlan
from knapformer.planners.elastic import plan_elastic
from knapformer.planners.static import plan_home, plan_static
from knapformer.workload import WorkloadModel


def plan_routes(
    len_S: ArrayLike,
    home_S: ArrayLike,
    *,
    ranks: int,
    layout: str,
    heads: int,
    cost: WorkloadModel,
    domain: int = 8,
    max_tokens: int | None = None,
) -> RoutingPlan:
    """Decide which rank hosts which part of which sequence; pure, and the same on every rank and machine.

    len_S: [S] tokens of each sequence; home_S: [S] the rank that loaded it, in any order.
    layout: "none", a bag spec such as "g1n16+g4n4" (the paper's), or "elastic".
    heads: attention heads, which every degree divides.
    domain: consecutive ranks inside which a sequence is split.
    max_tokens: most tokens a rank may host.
    Raises ValueError for lengths, homes or layouts that cannot be, and when one step cannot hold the tokens.
    """
    check_layout(layout, ranks=ranks, heads=heads, domain=domain)
    lens, homes = _checked(len_S, home_S, ranks)
    _check_cap(lens, layout, max_tokens, split_degrees(heads, ranks, domain))
    plan = _planner(layout, ranks, heads, cost, domain, max_tokens)(lens, homes)
    if plan is None:
        raise ValueError(
            f"layout {layout!r} found no plan of {lens.sum()} tokens on {ranks} ranks under "
            f"max_tokens={max_tokens}; raise it, lower the batch, or cut the step by plan_micro_steps"
        )
    return plan


def plan_micro_steps(
    len_S: ArrayLike,
    home_S: ArrayLike,
    *,
    ranks: int,
    layout: str,
    heads: int,
    cost: WorkloadModel,
    domain: int = 8,
    max_tokens: int | None = None,
) -> tuple[RoutingPlan, ...]:
    """The plan of `plan_routes` if it fits under max_tokens, else plans of the fewest micro-steps that do.

    Every rank takes every micro-step, if only with zero tokens. seq_C keeps the numbers of the global batch.
    """
    check_layout(layout, ranks=ranks, heads=heads, domain=domain)
    lens, homes = _checked(len_S, home_S, ranks)
    _check_cap(lens, layout, max_tokens, split_degrees(heads, ranks, domain))
    planner = _planner(layout, ranks, heads, cost, domain, max_tokens)
    # Sequences move freely inside a region only, so each region fills its own micro-steps.
    region = 1 if layout == "none" else ranks
    if layout not in ("none", "elastic"):
        region = sum(size * count for size, count in parse_bags(layout))
    tokens_R = np.bincount(homes // region, lens, minlength=1)
    steps = 1 if max_tokens is None else max(1, int(-(-tokens_R.max() // (region * max_tokens))))
    while True:
        step_S = _deal(lens, homes // region, steps)
        plans = []
        for step in range(steps):
            seqs = np.flatnonzero(step_S == step)
            plan = planner(lens[seqs], homes[seqs])
            if plan is None:
                break
            plans.append(RoutingPlan(ranks, seqs[plan.seq_C], plan.len_C, plan.home_C, plan.host_C))
        if len(plans) == steps:
            return tuple(plans)
        if steps >= len(lens):  # already one sequence a micro-step
            raise ValueError(
                f"layout {layout!r} finds no plan under max_tokens={max_tokens}, even for one sequence at a "
                "time; raise max_tokens or choose another layout"
            )
        steps += 1


def own_sequences(plans: Sequence[RoutingPlan], rank: int) -> tuple[np.ndarray, ...]:
    """For each micro-step of a batch, which of the sequences that `rank` loaded it takes, by their place.

    Ascending; it needs all plans of the batch, and sequences numbered by rank, as `gather_lengths` does.
    """
    taken = [np.unique(plan.seq_C[plan.home_C == rank]) for plan in plans]
    own_S = np.sort(np.concatenate(taken))
    return tuple(np.searchsorted(own_S, seqs) for seqs in taken)


def _planner(
    layout: str, ranks: int, heads: int, cost: WorkloadModel, domain: int, max_tokens: int | None
) -> Callable[[np.ndarray, np.ndarray], RoutingPlan | None]:
    """lens, homes -> the layout's plan, or None where it would exceed max_tokens."""

    def plan(lens: np.ndarray, homes: np.ndarray) -> RoutingPlan | None:
        if layout == "elastic":
            return plan_elastic(
                lens, homes, ranks=ranks, heads=heads, cost=cost, domain=domain, max_tokens=max_tokens
            )
        if layout == "none":
            fixed = plan_home(lens, homes, ranks=ranks)
        else:
            fixed = plan_static(
                lens, homes, ranks=ranks, layout=layout, heads=heads, cost=cost, domain=domain
            )
        return fixed if max_tokens is None or fixed.peak_tokens() <= max_tokens else None

    return plan


def _deal(len_S: np.ndarray, region_S: np.ndarray, steps: int) -> np.ndarray:
    """[S] micro-step of each sequence: longest first, to the step with the fewest tokens of its region."""
    step_S = np.zeros(len(len_S), np.int64)
    if steps == 1:
        return step_S
    tokens: dict[int, list[int]] = {}
    for seq in np.lexsort((np.arange(len(len_S)), -len_S)).tolist():
        held = tokens.setdefault(int(region_S[seq]), [0] * steps)
        step_S[seq] = held.index(min(held))
        held[step_S[seq]] += int(len_S[seq])
    return step_S


def _checked(len_S: ArrayLike, home_S: ArrayLike, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    lens, homes = np.asarray(len_S), np.asarray(home_S)
    if lens.ndim != 1 or lens.shape != homes.shape:
        raise ValueError(f"lengths {lens.shape} and homes {homes.shape} must be two vectors of the same size")
    for name, values in (("length", lens), ("home", homes)):
        if values.size and not np.issubdtype(values.dtype, np.integer):
            raise ValueError(f"{name}s of type {values.dtype} must be integers")
    lens, homes = lens.astype(np.int64), homes.astype(np.int64)
    if len(lens) and lens.min() < 1:
        seq = int(lens.argmin())
        raise ValueError(f"sequence {seq} has length {lens[seq]}; lengths are at least 1, drop empty ones")
    wrong = np.flatnonzero((homes < 0) | (homes >= ranks))
    if len(wrong):
        raise ValueError(
            f"sequence {wrong[0]} has home {homes[wrong[0]]}; with {ranks} ranks homes are 0 to {ranks - 1}"
        )
    return lens, homes


def _check_cap(lens: np.ndarray, layout: str, max_tokens: int | None, degrees: list[int]) -> None:
    """Every sequence alone must fit, at the largest degree that the layout and its own length allow."""
    if max_tokens is None or not len(lens):
        return
    most = degrees[-1] if layout == "elastic" else 1 if layout == "none" else parse_bags(layout)[-1][0]
    degree_S = np.ones(len(lens), np.int64)
    for degree in degrees:
        degree_S[(lens >= degree) & (degree <= most)] = degree
    chunk_S = -(-lens // degree_S)
    seq = int(chunk_S.argmax())
    if max_tokens < chunk_S[seq]:
        raise ValueError(
            f"max_tokens={max_tokens} is below {chunk_S[seq]}, the smallest chunk of sequence {seq} "
            f"({lens[seq]} tokens over {degree_S[seq]} ranks, the most that layout {layout!r} allows); "
            "raise max_tokens, shorten the sequence or allow a larger degree"
        )
