"""How a layout does on the steps of a mix: planned for real, timed by the cluster model.

N steps, R ranks.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from knapformer import RoutingPlan, WorkloadModel, plan_micro_steps
from knapformer.cluster import Cluster, ModelShape, ideal_seconds, memory_R, step_seconds
from knapformer.layout import bag_layouts, split_degrees
from knapformer_cli.profile.mix import Batch, Mix

TIMED = "elastic cost=cluster"  # elastic, planned for the modelled seconds, traffic included
# The first three no layout can avoid: they make the ideal.
PARTS = ("compute", "gradients", "optimizer", "exchange", "routing", "waiting")


class CannotPlan(ValueError):
    """A layout that cannot plan a step of the mix, e.g. under its cap of tokens."""


@dataclass(frozen=True, eq=False)
class Scene:
    """What a mix is profiled on; `cost` plans, and `seconds` times (the cluster's own where None)."""

    mix: Mix
    cluster: Cluster
    shape: ModelShape
    cost: WorkloadModel
    seconds: WorkloadModel | None
    domain: int
    max_tokens: int | None

    def plan(self, layout: str, batch: Batch) -> tuple[RoutingPlan, ...]:
        """As training plans a step; ValueError where the layout cannot."""
        layout, cost = ("elastic", self.timed) if layout == TIMED else (layout, self.cost)
        return plan_micro_steps(
            batch.len_S,
            batch.home_S,
            ranks=self.mix.ranks,
            layout=layout,
            heads=self.shape.heads,
            cost=cost,
            domain=self.domain,
            max_tokens=self.max_tokens,
        )

    def step_seconds(self, plans: Sequence[RoutingPlan]) -> dict[str, float]:
        """Modelled seconds by part: of the mean rank, and `waiting` for what the slowest has beyond it."""
        step = step_seconds(plans, self.shape, self.cluster, self.seconds)
        busy_PR = step.busy_PR()
        return {
            "compute": float(step.compute_PR.mean(1).sum()),
            "waiting": float((busy_PR.max(1) - busy_PR.mean(1)).sum()),
            "exchange": float(step.exchange_PR.mean(1).sum()),
            "routing": float(step.routing_PR.mean(1).sum()),
            "gradients": float(step.gradients_P.sum()),
            "optimizer": step.optimizer,
        }

    def ideal_seconds(self) -> float:
        """Mean seconds of steps that are even, without exchange and routing."""
        lens = [batch.len_S for batch in self.mix.batches]
        return float(np.mean([ideal_seconds(x, self.shape, self.cluster, self.seconds) for x in lens]))

    def flop(self) -> float:
        """Mean FLOP of a step, recomputation included."""
        return float(np.mean([self.shape.flop(batch.len_S) for batch in self.mix.batches]))

    @property
    def timed(self) -> WorkloadModel:
        """The modelled seconds of a sequence, which know of traffic."""
        return self.cluster.workload(self.shape)

    def uniform_layouts(self) -> list[str]:
        """Every spec of equal bags that the ranks, heads and domain allow."""
        ranks = self.mix.ranks
        degrees = split_degrees(self.shape.heads, ranks, self.domain)
        return [f"g{g}n{ranks // g}" for g in degrees if bag_layouts(ranks, [g], self.domain)]


def settings_of(layout: str) -> list[str]:
    """The overrides that train with a layout."""
    return (
        ["balancer.layout=elastic", "balancer.cost=cluster"]
        if layout == TIMED
        else [f"balancer.layout={layout}"]
    )


@dataclass(frozen=True, eq=False)
class Score:
    """One layout over N steps; shares are of all tokens, over micro-steps maxima and means are summed."""

    layout: str
    work_N: np.ndarray  # of the busiest rank over the mean
    tokens_N: np.ndarray  # of the fullest rank over the mean
    sent_N: np.ndarray  # share that leaves its rank in one attention exchange
    moved_N: np.ndarray  # share that leaves home at routing
    crossed_N: np.ndarray  # share whose home and host are in different nodes
    plan_N: np.ndarray  # seconds of one core
    peak_N: np.ndarray  # tokens of the fullest rank
    micro_N: np.ndarray  # micro-steps
    parts_N: dict[str, np.ndarray]  # modelled seconds, by PARTS
    memory_R: np.ndarray  # modelled bytes, most of all steps

    @property
    def seconds(self) -> float:
        """Modelled, mean over steps."""
        return float(sum(part_N.mean() for part_N in self.parts_N.values()))


def score_layout(scene: Scene, layout: str, done: Callable[[], None] = lambda: None) -> Score:
    """Plan every step of the mix with the layout; CannotPlan names the step where one cannot be planned."""
    rows, parts = [], []
    peak_memory_R = np.zeros(scene.mix.ranks)
    for number, batch in zip(scene.mix.steps, scene.mix.batches, strict=True):
        begin = time.thread_time()
        try:
            plans = scene.plan(layout, batch)
        except ValueError as error:
            words = str(error).replace("max_tokens", "training.max_tokens_per_rank")
            raise CannotPlan(f"step {number}: {words}") from error
        planned = time.thread_time() - begin
        rows.append([*_numbers(plans, scene), planned])
        parts.append(scene.step_seconds(plans))
        peak_memory_R = np.maximum(peak_memory_R, memory_R(plans, scene.shape, scene.cluster))
        done()
    work_N, tokens_N, sent_N, moved_N, crossed_N, peak_N, micro_N, plan_N = np.array(rows).T
    return Score(
        layout=layout,
        work_N=work_N,
        tokens_N=tokens_N,
        sent_N=sent_N,
        moved_N=moved_N,
        crossed_N=crossed_N,
        plan_N=plan_N,
        peak_N=peak_N.astype(np.int64),
        micro_N=micro_N.astype(np.int64),
        parts_N={part: np.array([step[part] for step in parts]) for part in PARTS},
        memory_R=peak_memory_R,
    )


def _numbers(plans: Sequence[RoutingPlan], scene: Scene) -> list[float]:
    work_PR = np.stack([plan.work_R(scene.cost) for plan in plans])
    tokens_PR = np.stack([plan.tokens_R() for plan in plans])
    weight_P, node = tokens_PR.sum(1), scene.cluster.node
    shares = [(plan.attention_sent(), plan.moved(), plan.crossed(node)) for plan in plans]
    sent, moved, crossed = np.average(shares, axis=0, weights=weight_P).tolist()
    return [
        work_PR.max(1).sum() / work_PR.mean(1).sum(),
        tokens_PR.max(1).sum() / tokens_PR.mean(1).sum(),
        sent,
        moved,
        crossed,
        tokens_PR.max(),
        len(plans),
    ]
