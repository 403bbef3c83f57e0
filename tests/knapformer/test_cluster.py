"""The modelled step: what was published comes out of one set of constants, and its parts obey their laws."""

from dataclasses import replace

import numpy as np
import pytest

from data.codes import synthetic_lengths
from knapformer import RoutingPlan, WorkloadModel, plan_routes
from knapformer.cluster import (
    COPIES_OF_A_ROW,
    Cluster,
    ModelShape,
    gradient_seconds,
    hardware_utilization,
    ideal_seconds,
    memory_R,
    step_seconds,
)

H100, FLUX = Cluster(), ModelShape()
# The published implementation routes hidden states with their rotary table, there and back, with gradients.
PUBLISHED = replace(FLUX, routed_bytes=4 * 13.3e3)
JOINT = [synthetic_lengths("paper_joint", seed) for seed in range(20)]


def planned(batch, layout: str, cluster: Cluster = H100, model: ModelShape = FLUX) -> RoutingPlan:
    lens, homes = batch
    return plan_routes(
        lens, homes, ranks=cluster.ranks, layout=layout, heads=model.heads, cost=cluster.workload(model)
    )


def mean_step(layout: str, model: ModelShape) -> tuple[float, float, float]:
    """Seconds, HFU and tokens a second of the joint mix."""
    seconds = [step_seconds([planned(batch, layout)], model, H100).total for batch in JOINT]
    tokens = np.mean([lens.sum() for lens, _ in JOINT])
    hfu = [hardware_utilization(lens, s, model, H100) for (lens, _), s in zip(JOINT, seconds, strict=True)]
    return float(np.mean(seconds)), float(np.mean(hfu)), float(tokens / np.mean(seconds))


def test_the_published_tokens_and_flop_of_a_joint_step_are_met():
    assert np.mean([lens.sum() for lens, _ in JOINT]) == pytest.approx(369_813, rel=0.01)
    assert np.mean([FLUX.flop(lens) for lens, _ in JOINT]) == pytest.approx(32_371e12, rel=0.01)


def test_one_set_of_constants_meets_the_published_steps_within_a_tenth():
    seconds, hfu, _ = mean_step("none", PUBLISHED)
    assert seconds == pytest.approx(8.05, rel=0.1)
    assert hfu == pytest.approx(0.127, rel=0.1)
    seconds, hfu, tokens_per_second = mean_step("g8n4", PUBLISHED)
    assert seconds == pytest.approx(3.44, rel=0.1)
    assert hfu == pytest.approx(0.297, rel=0.1)
    assert tokens_per_second == pytest.approx(107_500, rel=0.1)


def test_an_elastic_joint_step_is_modelled_within_a_twentieth_of_the_ideal():
    of_ideal = [
        ideal_seconds(batch[0], FLUX, H100) / step_seconds([planned(batch, "elastic")], FLUX, H100).total
        for batch in JOINT
    ]
    assert np.mean(of_ideal) >= 0.95


@pytest.mark.parametrize("layout", ["none", "g1n32", "g8n4", "g1n16+g4n4", "elastic"])
def test_the_parts_are_the_total_and_no_plan_beats_the_ideal(layout):
    for batch in JOINT[:3]:
        step = step_seconds([planned(batch, layout)], FLUX, H100)
        assert sum(step.parts.values()) == pytest.approx(step.total)
        assert min(step.parts.values()) >= 0
        assert step.total >= ideal_seconds(batch[0], FLUX, H100)


def test_whole_sequences_exchange_nothing_and_kept_ones_route_nothing():
    step = step_seconds([planned(JOINT[0], "none")], FLUX, H100)
    assert not step.exchange_PR.any() and not step.hidden_PR.any() and not step.routing_PR.any()


def test_only_whole_sequences_hide_an_exchange():
    lens, homes = np.array([4000, 4000]), np.array([0, 0])
    cluster = Cluster(ranks=2)
    split = plan_routes(lens, homes, ranks=2, layout="g2n1", heads=24, cost=cluster.workload(FLUX))
    alone = step_seconds([split], FLUX, cluster)
    assert not alone.hidden_PR.any()

    homes, seq, host = np.array([0, 0, 1]), np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 1])
    whole_too = RoutingPlan.of_pieces(2, homes, seq, np.array([2000, 2000, 2000, 2000, 8000]), host)
    beside = step_seconds([whole_too], FLUX, cluster)
    assert beside.hidden_PR[0].tolist() == [0.0, pytest.approx(0.75 * wire(cluster), rel=1e-9)]
    assert (beside.exchange_PR + beside.hidden_PR)[0] == pytest.approx(alone.exchange_PR[0])


def wire(cluster: Cluster) -> float:
    """Seconds that half of 4,000 tokens take to their peer in the same node."""
    return 2000 * FLUX.exchanged_bytes / cluster.bandwidth


def test_exchange_and_routing_pay_for_the_link_that_they_take():
    plan = RoutingPlan.of_pieces(2, np.array([0]), np.array([0, 0]), np.array([4000, 4000]), np.array([0, 1]))
    near = Cluster(ranks=2, node=2, latency=1e-12)
    far = replace(near, node=1)
    ratio = near.bandwidth / near.bandwidth_across
    inside, across = (step_seconds([plan], FLUX, c) for c in (near, far))
    copies = COPIES_OF_A_ROW * 4000 * FLUX.exchanged_bytes / near.memory_bandwidth
    assert across.exchange_PR - copies == pytest.approx(ratio * (inside.exchange_PR - copies))
    assert across.routing_PR == pytest.approx(ratio * inside.routing_PR)
    assert inside.routing_PR[0, 0] == pytest.approx(4000 * FLUX.routed_bytes / near.bandwidth)


def test_gradient_traffic_hides_behind_compute_and_no_further():
    small = plan_routes([10], [0], ranks=32, layout="none", heads=24, cost=H100.workload(FLUX))
    traffic = gradient_seconds(FLUX, H100)
    bare = step_seconds([small], FLUX, H100)
    assert bare.parts["gradients"] + bare.parts["compute"] == pytest.approx(traffic)
    full = step_seconds([planned(JOINT[0], "none")], FLUX, H100)
    assert full.parts["gradients"] == pytest.approx((1 - H100.overlap) * traffic)
    one = Cluster(ranks=1)
    assert gradient_seconds(FLUX, one) == 0


def test_micro_steps_each_wait_for_their_slowest_rank():
    first, second = (planned(batch, "none") for batch in JOINT[:2])
    each = [step_seconds([plan], FLUX, H100) for plan in (first, second)]
    both = step_seconds([first, second], FLUX, H100)
    assert both.total == pytest.approx(sum(step.total for step in each) - both.optimizer)
    assert memory_R([first, second], FLUX, H100) == pytest.approx(
        np.maximum(memory_R([first], FLUX, H100), memory_R([second], FLUX, H100))
    )


def test_fitted_coefficients_replace_the_clusters_compute():
    plan, cost = planned(JOINT[0], "none"), WorkloadModel(linear=1e-6, quadratic=1e-11)
    assert step_seconds([plan], FLUX, H100, cost).compute_PR[0] == pytest.approx(plan.work_R(cost))


def test_memory_grows_with_the_tokens_and_shrinks_with_the_ranks():
    plan = planned(JOINT[0], "elastic")
    tokens_R, bytes_R = plan.tokens_R(), memory_R([plan], FLUX, H100)
    assert np.diff(bytes_R) == pytest.approx(np.diff(tokens_R) * FLUX.token_bytes)
    kept = replace(FLUX, recompute=False)
    assert memory_R([plan], kept, H100).max() > H100.memory > bytes_R.max()


def test_gamma_is_the_ratio_of_the_efficiencies():
    cost, paper = H100.workload(FLUX), WorkloadModel.analytic(width=3072, gamma=H100.gamma)
    assert cost.quadratic / cost.linear == pytest.approx(paper.quadratic / paper.linear)
    assert pytest.approx(0.49, abs=0.005) == H100.gamma


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Cluster(ranks=0), "ranks=0"),
        (lambda: Cluster(node=-8), "node=-8"),
        (lambda: Cluster(bandwidth=float("nan")), "bandwidth=nan"),
        (lambda: Cluster(peak_flops=float("inf")), "peak_flops=inf"),
        (lambda: Cluster(linear_efficiency=1.5), "linear_efficiency=1.5"),
        (lambda: ModelShape(width=0), "width=0"),
        (lambda: ModelShape(routed_bytes=-1), "routed_bytes=-1"),
        (lambda: step_seconds([planned(JOINT[0], "none")], FLUX, Cluster(ranks=64)), "32 ranks"),
    ],
)
def test_numbers_that_cannot_be_are_named(make, named):
    with pytest.raises(ValueError, match=named):
        make()
