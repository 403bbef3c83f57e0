"""The fixed layouts: the paper's greedy in cases computed by hand, and what bags guarantee."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer import WorkloadModel, plan_routes
from tests.knapformer.batches import COST, batches, is_partition

LINEAR = WorkloadModel(linear=1.0, quadratic=0.0)


def hosts_of(plan, seq):
    return plan.host_C[plan.seq_C == seq].tolist()


def test_none_keeps_every_sequence_whole_at_home():
    plan = plan_routes([5, 3, 9], [2, 0, 2], ranks=3, layout="none", heads=4, cost=LINEAR)
    assert plan.seq_C.tolist() == [1, 0, 2]
    assert plan.host_C.tolist() == plan.home_C.tolist() == [0, 2, 2]
    assert plan.moved() == plan.attention_sent() == 0


def test_longest_first_to_the_least_occupied_bag():
    # By hand: 8 -> bag 0, 5 -> bag 1, 4 -> bag 1 (5 < 8), 3 -> bag 0 (8 < 9): 11 and 9.
    plan = plan_routes([4, 8, 3, 5], [0, 0, 1, 1], ranks=2, layout="g1n2", heads=4, cost=LINEAR)
    assert [hosts_of(plan, s) for s in range(4)] == [[1], [0], [0], [1]]


def test_only_bags_that_could_hold_a_sequence_when_empty_are_asked():
    # Mean 6 a rank: 12 and 8 fit the pair (2 x 6) alone; 2 and 2 go to the empty single ranks.
    plan = plan_routes([2, 12, 2, 8], [0] * 4, ranks=4, layout="g1n2+g2n1", heads=4, cost=LINEAR)
    assert [hosts_of(plan, s) for s in range(4)] == [[0], [2, 3], [1], [2, 3]]


def test_occupancy_is_relative_to_the_size_of_the_bag():
    # Mean 10: 18 -> the pair (9 a rank), 10 and 10 -> ranks 0 and 1, 2 -> the pair (9 < 10).
    plan = plan_routes([18, 10, 10, 2], [0] * 4, ranks=4, layout="g1n2+g2n1", heads=4, cost=LINEAR)
    assert [hosts_of(plan, s) for s in range(4)] == [[2, 3], [0], [1], [2, 3]]


def test_what_no_bag_can_hold_goes_to_the_largest_kind():
    plan = plan_routes([100, 1, 1, 1], [0] * 4, ranks=4, layout="g1n2+g2n1", heads=4, cost=LINEAR)
    assert hosts_of(plan, 0) == [2, 3]


def test_shards_are_as_even_as_whole_tokens_allow():
    plan = plan_routes([11], [1], ranks=4, layout="g4n1", heads=4, cost=LINEAR)
    assert plan.len_C.tolist() == [3, 3, 3, 2] and plan.host_C.tolist() == [0, 1, 2, 3]


def test_fewer_tokens_than_ranks_are_split_by_the_largest_divisor_of_the_heads_they_allow():
    plan = plan_routes([3, 1], [0, 0], ranks=4, layout="g4n1", heads=4, cost=LINEAR)
    assert plan.len_C.tolist() == [2, 1, 1] and plan.host_C.tolist() == [0, 1, 0]


def test_a_replica_balances_its_own_ranks_alone():
    plan = plan_routes([7, 7, 1, 1], [0, 0, 2, 3], ranks=4, layout="g1n2", heads=4, cost=LINEAR)
    assert [hosts_of(plan, s) for s in range(4)] == [[0], [1], [2], [3]]


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_uniform_layouts_are_partitions_and_split_tokens_evenly_inside_a_bag(degree, data):
    lens, homes, ranks = data.draw(batches(max_ranks=8))
    ranks *= degree
    plan = plan_routes(lens, homes, ranks=ranks, layout=f"g{degree}n{ranks // degree}", heads=24, cost=COST)
    is_partition(plan, lens, homes, heads=24, domain=8)
    if len(lens) and lens.min() >= degree:
        tokens_BG = plan.tokens_R().reshape(-1, degree)
        assert (tokens_BG.max(1) - tokens_BG.min(1) <= 1).all()


@settings(max_examples=300, deadline=None)
@given(batches(max_ranks=4), st.sampled_from(["g1n2+g2n3", "g1n4+g4n1", "g2n2+g4n1", "g1n6+g2n1", "g8n1"]))
def test_mixed_bags_and_replicas_are_partitions(batch, layout):
    lens, homes, ranks = batch
    plan = plan_routes(lens, homes, ranks=8 * ranks, layout=layout, heads=24, cost=COST)
    is_partition(plan, lens, homes, heads=24, domain=8)


@settings(max_examples=100, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_the_order_of_homes_changes_nothing_but_numbers(batch, random):
    lens, homes, ranks = batch
    plan = plan_routes(lens, homes, ranks=ranks, layout="none", heads=24, cost=COST)
    shuffle = np.array(random.sample(range(len(lens)), len(lens)), np.int64)
    again = plan_routes(lens[shuffle], homes[shuffle], ranks=ranks, layout="none", heads=24, cost=COST)
    assert (plan.tokens_RR() == again.tokens_RR()).all()
