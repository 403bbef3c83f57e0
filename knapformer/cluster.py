"""A modelled training step: what a plan costs on a cluster that is not at hand.

The slowest rank's compute, attention exchanges that nothing hides and routing, then gradient traffic that
nothing hides and the optimizer. Every figure from here is modelled, never measured.

P micro-steps, R ranks, C chunks, S sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from knapformer.plan import RoutingPlan
from knapformer.workload import WorkloadModel

# Reads and writes of an exchanged row (knapformer/attention.py): queries, keys and values are gathered,
# stacked and put in place, outputs gathered and put in place; so on average of the four.
COPIES_OF_A_ROW = (3 * 6 + 4) / 4
# Values kept for backward, of each token and block, in widths: 25 in a single-stream block, 30 in a
# double-stream or plain one (counted over the tensors that autograd saves).
KEPT_WIDTHS = 28
# Bytes of a float32 parameter with gradient, two moments of Adam and an average.
STATE_BYTES = 20
# Bytes of a parameter that an update touches: the norm reads its gradient, clipping reads and writes it;
# Adam reads four values and writes three; the average reads two and writes one.
UPDATE_BYTES = 52


@dataclass(frozen=True)
class Cluster:
    """R equal devices in nodes of `node`; rates are bytes, FLOP and seconds, per rank. Defaults: H100 SXM.

    The efficiencies are shares of `peak_flops` that a block reaches in its linear part (matrix products with
    the norms and modulation between them) and in attention; their ratio is the gamma of the workload model.
    The defaults reproduce the step times published for KnapFormer (Zhang et al., arXiv 2508.06001) on 32
    H100, and no more is claimed for them.
    """

    ranks: int = 32
    node: int = 8
    peak_flops: float = 989e12
    """Of one device, dense, in the dtype of compute."""
    memory: float = 80 * 2**30
    """Bytes of one device."""
    memory_bandwidth: float = 3.35e12
    bandwidth: float = 200e9
    """Bytes a second that a rank sends, or receives, inside its node."""
    bandwidth_across: float = 50e9
    """The same between nodes."""
    latency: float = 20e-6
    """Seconds of one collective without any bytes."""
    linear_efficiency: float = 0.285
    attention_efficiency: float = 0.58
    overlap: float = 0.9
    """Share of the gradient traffic that hides behind compute as long as there is compute."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"cluster {name}={value} must be a finite number greater than 0")
        for name in ("linear_efficiency", "attention_efficiency", "overlap"):
            if getattr(self, name) > 1:
                raise ValueError(f"cluster {name}={getattr(self, name)} is a share; it must be at most 1")
        for name in ("ranks", "node"):
            if getattr(self, name) != int(getattr(self, name)):
                raise ValueError(f"cluster {name}={getattr(self, name)} must be a whole number")

    @property
    def gamma(self) -> float:
        """How many matrix-product FLOP take as long as one of attention."""
        return self.linear_efficiency / self.attention_efficiency

    def workload(self, model: "ModelShape") -> WorkloadModel:
        """Seconds of a sequence in a whole step, traffic included: what planners and bounds take.

        All of the exchange is counted, because what hides of it depends on the plan. Rows that a rank keeps
        are copied too, 4/3 of those that leave at the usual degree of 4.
        """
        blocks, row = model.blocks, model.exchanged_bytes
        copies = 4 / 3 * COPIES_OF_A_ROW / self.memory_bandwidth
        return WorkloadModel(
            linear=blocks * model.passes * model.linear_flop / (self.peak_flops * self.linear_efficiency),
            quadratic=blocks
            * model.passes
            * 4.0
            * model.width
            / (self.peak_flops * self.attention_efficiency),
            traffic=row * (1 / self.bandwidth + copies),
            traffic_across=row * (1 / self.bandwidth_across + copies),
            node=self.node,
        )


@dataclass(frozen=True)
class ModelShape:
    """What of a diffusion transformer decides its step; its blocks cost alike. Defaults: FLUX, 19 + 38."""

    width: int = 3072
    heads: int = 24
    blocks: int = 57
    parameters: float = 11.9e9
    mlp_ratio: float = 4.0
    recompute: bool = True
    """Every block's forward runs once more before its backward."""
    element_bytes: int = 2
    """Of activations and gathered parameters."""
    routed_bytes: float = 140.0
    """Of a token that leaves home, all its routing together: 64 bf16 latent channels, 3 int32 positions."""

    def __post_init__(self) -> None:
        for name in ("width", "heads", "blocks", "parameters", "mlp_ratio", "element_bytes"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ValueError(f"model {name}={getattr(self, name)} must be a finite number greater than 0")
        if not (math.isfinite(self.routed_bytes) and self.routed_bytes >= 0):
            raise ValueError(f"model routed_bytes={self.routed_bytes} must be a finite number of at least 0")

    @property
    def linear_flop(self) -> float:
        """FLOP of a token in the matrix products of one block, forward: 24 d^2 with an MLP of ratio 4."""
        return (8.0 + 4.0 * self.mlp_ratio) * self.width**2

    @property
    def passes(self) -> int:
        """Forwards that a step costs: one, twice that in backward, one more where it is recomputed."""
        return 4 if self.recompute else 3

    @property
    def exchanges(self) -> int:
        """Times that a block exchanges in a step: forward, backward, recomputation."""
        return 3 if self.recompute else 2

    @property
    def exchanged_bytes(self) -> float:
        """Bytes of a token's row in all attention exchanges of a step: q, k, v and the output."""
        return self.blocks * self.exchanges * 4.0 * self.width * self.element_bytes

    @property
    def token_bytes(self) -> float:
        """Activations of a token that a rank holds until backward."""
        kept = KEPT_WIDTHS + self.blocks if self.recompute else KEPT_WIDTHS * self.blocks
        return float(kept * self.width * self.element_bytes)

    def flop(self, len_S: ArrayLike) -> float:
        """FLOP of a step over sequences of these lengths, recomputation included, attention in full."""
        len_S = np.asarray(len_S, float)
        return float(
            self.blocks * self.passes * (self.linear_flop * len_S + 4.0 * self.width * len_S**2).sum()
        )


@dataclass(frozen=True, eq=False)
class StepSeconds:
    """The seconds of one optimizer step, by part; those with a rank's suffix differ between ranks."""

    compute_PR: np.ndarray
    exchange_PR: np.ndarray
    """Attention exchanges that no compute hides."""
    hidden_PR: np.ndarray
    """Attention exchanges that the attention of whole sequences hides; no part of the total."""
    routing_PR: np.ndarray
    gradients_P: np.ndarray
    """Gathering parameters and scattering gradients, as far as no compute hides it."""
    optimizer: float

    def busy_PR(self) -> np.ndarray:
        """[P, R] what a rank does before it waits for the slowest."""
        return self.compute_PR + self.exchange_PR + self.routing_PR

    @property
    def total(self) -> float:
        """Seconds of the step: every micro-step is as long as its slowest rank."""
        return float(self.busy_PR().max(1).sum() + self.gradients_P.sum() + self.optimizer)

    @property
    def parts(self) -> dict[str, float]:
        """The total by part, those of the slowest rank of each micro-step."""
        slowest_P1 = self.busy_PR().argmax(1)[:, None]
        by_rank = {"compute": self.compute_PR, "exchange": self.exchange_PR, "routing": self.routing_PR}
        at_slowest = {
            name: float(np.take_along_axis(x_PR, slowest_P1, 1).sum()) for name, x_PR in by_rank.items()
        }
        return {**at_slowest, "gradients": float(self.gradients_P.sum()), "optimizer": self.optimizer}


def step_seconds(
    plans: Sequence[RoutingPlan], model: ModelShape, cluster: Cluster, cost: WorkloadModel | None = None
) -> StepSeconds:
    """The modelled step of these micro-steps' plans (one plan, where a step is not cut).

    `cost` replaces the cluster's own compute by fitted coefficients in seconds; its traffic is not used,
    because a plan says which peers are near. ValueError for plans of another number of ranks.
    """
    cost = cost or cluster.workload(model)
    for plan in plans:
        if plan.n_ranks != cluster.ranks:
            raise ValueError(f"the plan is for {plan.n_ranks} ranks, and the cluster has {cluster.ranks}")
    compute_PR = np.stack([plan.work_R(cost) for plan in plans])
    exchange = [_exchange(plan, model, cluster, cost) for plan in plans]
    routing_PR = np.stack([_routing_R(plan, model, cluster) for plan in plans])
    return StepSeconds(
        compute_PR=compute_PR,
        exchange_PR=np.stack([open_R for open_R, _ in exchange]),
        hidden_PR=np.stack([hidden_R for _, hidden_R in exchange]),
        routing_PR=routing_PR,
        gradients_P=_open_gradients(compute_PR.max(1), model, cluster),
        optimizer=_update(model, cluster),
    )


def ideal_seconds(
    len_S: ArrayLike, model: ModelShape, cluster: Cluster, cost: WorkloadModel | None = None
) -> float:
    """Seconds that no plan can beat: compute spread evenly, no exchange, no routing, the update as it is.

    So the published unbalanced step over its max/mean of work, 8.05 s / 2.91 = 2.77 s, is such an ideal.
    """
    compute = float((cost or cluster.workload(model)).work(len_S).sum() / cluster.ranks)
    return compute + float(_open_gradients(np.array([compute]), model, cluster)[0]) + _update(model, cluster)


def hardware_utilization(len_S: ArrayLike, seconds: float, model: ModelShape, cluster: Cluster) -> float:
    """HFU: the share of the peak of all ranks that a step's FLOP are, recomputation included."""
    return model.flop(len_S) / (seconds * cluster.ranks * cluster.peak_flops)


def memory_R(plans: Sequence[RoutingPlan], model: ModelShape, cluster: Cluster) -> np.ndarray:
    """[R] bytes: sharded state, two blocks gathered whole with the gradients of one, most tokens at once."""
    tokens_R = np.max([plan.tokens_R() for plan in plans], axis=0)
    block = model.parameters / model.blocks
    gathered = block * (2 * model.element_bytes + 4) if cluster.ranks > 1 else 0.0
    return STATE_BYTES * model.parameters / cluster.ranks + gathered + tokens_R * model.token_bytes


def gradient_seconds(model: ModelShape, cluster: Cluster) -> float:
    """Sharded data parallelism's traffic: parameters gathered twice, float32 gradients scattered once.

    Each node receives a copy over all its links between nodes, and spreads it inside: the slower link rules.
    """
    rows = model.parameters * (2 * model.element_bytes + 4)
    nodes = math.ceil(cluster.ranks / cluster.node)
    inside = rows * (cluster.ranks - 1) / cluster.ranks / cluster.bandwidth
    links = min(cluster.node, cluster.ranks) * cluster.bandwidth_across
    return max(inside, rows * (nodes - 1) / nodes / links)


def _open_gradients(compute_P: np.ndarray, model: ModelShape, cluster: Cluster) -> np.ndarray:
    """[P] the share of the traffic that never hides, or what outlasts the compute that could hide it."""
    traffic = gradient_seconds(model, cluster)
    return np.maximum((1 - cluster.overlap) * traffic, traffic - compute_P)


def _update(model: ModelShape, cluster: Cluster) -> float:
    return UPDATE_BYTES * model.parameters / cluster.ranks / cluster.memory_bandwidth


def _exchange(
    plan: RoutingPlan, model: ModelShape, cluster: Cluster, cost: WorkloadModel
) -> tuple[np.ndarray, np.ndarray]:
    """[R] seconds of attention exchanges in the open, and hidden behind whole sequences' attention.

    Queries, keys and values (in backward their gradients) travel while whole sequences are attended to; the
    outputs' way back is in the open (knapformer/attention.py).
    """
    degree_C, host_C = plan.degree_C(), plan.host_C
    split_C = degree_C > 1
    if not split_C.any():
        return np.zeros(plan.n_ranks), np.zeros(plan.n_ranks)

    def total_R(rows_C: np.ndarray) -> np.ndarray:
        return np.bincount(host_C, rows_C, minlength=plan.n_ranks)

    # Chunks of the same sequence in the same node are near; a rank sends each peer 1/degree of its rows.
    place_C = plan.seq_C * (plan.n_ranks // cluster.node + 1) + host_C // cluster.node
    _, place_C = np.unique(place_C, return_inverse=True)
    near_C = np.bincount(place_C)[place_C]
    near_len_C = np.bincount(place_C, plan.len_C)[place_C]
    near_R = np.maximum(
        total_R(plan.len_C * (near_C - 1) / degree_C), total_R((near_len_C - plan.len_C) / degree_C)
    )
    far_R = np.maximum(
        total_R(plan.len_C * (degree_C - near_C) / degree_C),
        total_R((plan.total_C() - near_len_C) / degree_C),
    )
    wire_R = model.exchanged_bytes * np.maximum(near_R / cluster.bandwidth, far_R / cluster.bandwidth_across)
    copies_R = COPIES_OF_A_ROW * model.exchanged_bytes * total_R(plan.len_C * split_C)
    calls = 2 * model.blocks * model.exchanges * cluster.latency * (total_R(split_C) > 0)
    whole_R = total_R(cost.quadratic * plan.len_C.astype(float) ** 2 * ~split_C)
    hidden_R = np.minimum(0.75 * wire_R, whole_R)
    return wire_R - hidden_R + copies_R / cluster.memory_bandwidth + calls, hidden_R


def _routing_R(plan: RoutingPlan, model: ModelShape, cluster: Cluster) -> np.ndarray:
    """[R] seconds of bringing tokens from home to host: the fuller direction of the slower link."""
    away_C = plan.home_C != plan.host_C
    if not away_C.any():
        return np.zeros(plan.n_ranks)
    far_C = plan.home_C // cluster.node != plan.host_C // cluster.node
    seconds_R = np.zeros(plan.n_ranks)
    for link_C, rate in ((away_C & ~far_C, cluster.bandwidth), (far_C, cluster.bandwidth_across)):
        for end_C in (plan.home_C, plan.host_C):
            rows_R = np.bincount(end_C, plan.len_C * link_C, minlength=plan.n_ranks)
            seconds_R = np.maximum(seconds_R, rows_R * model.routed_bytes / rate)
    return seconds_R + cluster.latency
