"""The plan's figures in cases computed by hand, its files, and what plan_routes refuses."""

import json

import numpy as np
import pytest
from hypothesis import given, settings

from knapformer import RoutingPlan, WorkloadModel, plan_micro_steps, plan_routes
from knapformer.layout import split_degrees
from tests.knapformer.batches import COST, batches, is_partition

LINEAR = WorkloadModel(linear=1.0, quadratic=0.0)


@pytest.fixture
def plan():
    """10 tokens whole at home on rank 0; 8 of rank 1 split over ranks 2 and 3; rank 1 idle."""
    return RoutingPlan.of_pieces(
        4, np.array([1, 0]), np.array([1, 0, 0]), np.array([10, 4, 4]), np.array([0, 2, 3])
    )


def test_pieces_in_any_order_become_chunks_in_order_of_home_and_sequence(plan):
    assert plan.seq_C.tolist() == [1, 0, 0]
    assert plan.home_C.tolist() == [0, 1, 1]
    assert plan.offset_C().tolist() == [0, 0, 4]
    assert plan.degree_C().tolist() == [1, 2, 2]
    assert plan.total_C().tolist() == [10, 8, 8]


def test_tokens_and_work_of_every_rank(plan):
    cost = WorkloadModel(linear=1.0, quadratic=0.5, traffic=2.0)
    assert plan.tokens_R().tolist() == [10, 0, 4, 4] and plan.peak_tokens() == 10
    shard = 4 + 0.5 * 64 / 2
    assert plan.work_R(cost).tolist() == [60, 0, shard, shard]
    assert plan.max_over_mean(cost) == pytest.approx(60 / ((60 + 2 * shard) / 4))
    assert plan.seconds_R(cost).tolist() == [60, 0, shard + 4, shard + 4]  # half of 4 rows leave, at 2.0
    assert plan.seconds(cost) == 60


def test_what_moves_crosses_nodes_and_is_sent(plan):
    assert plan.moved() == 8 / 18
    assert plan.crossed(node=2) == 8 / 18 and plan.crossed(node=4) == 0
    assert plan.attention_sent() == 8 / 2 / 18


def test_the_gap_is_to_the_bound_of_the_same_sequences(plan):
    # 18 tokens over 4 ranks: 4.5 is possible, 10 is planned.
    assert plan.lower_bound(LINEAR, heads=4) == pytest.approx(4.5)
    assert plan.gap(LINEAR, heads=4) == pytest.approx(10 / 4.5 - 1)


def test_a_step_without_sequences_is_a_plan():
    for layout in ("none", "g2n2", "elastic"):
        plan = plan_routes([], [], ranks=4, layout=layout, heads=4, cost=LINEAR)
        assert len(plan.seq_C) == 0 and plan.tokens_R().tolist() == [0] * 4
        assert plan.moved() == plan.attention_sent() == plan.seconds(LINEAR) == 0
        assert plan.max_over_mean(LINEAR) == 1 and plan.gap(LINEAR, heads=4) == 0


def test_traffic_knows_which_hosts_share_a_node(plan):
    cost = WorkloadModel(linear=1.0, quadratic=0.0, traffic=2.0, traffic_across=10.0, node=2)
    assert plan.near_C(2).tolist() == [0, 1, 1] and plan.near_C(1).tolist() == [0, 0, 0]
    assert plan.seconds_R(cost).tolist() == [10, 0, 4 + 2 * 2.0, 4 + 2 * 2.0]
    apart = RoutingPlan(4, plan.seq_C, plan.len_C, plan.home_C, [0, 1, 2])
    assert apart.seconds_R(cost).tolist() == [10, 4 + 2 * 10.0, 4 + 2 * 10.0, 0]


def test_nobody_can_change_a_plan_and_it_does_not_lock_its_makers_arrays():
    columns = [np.array(x) for x in ([0], [5], [0], [1])]
    plan = RoutingPlan(2, *columns)
    for name in ("seq_C", "len_C", "home_C", "host_C"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, name)[0] = 1
    columns[0][0] = 0


@settings(max_examples=200, deadline=None)
@given(batches())
@pytest.mark.parametrize("layout", ["none", "elastic"])
def test_every_plan_survives_its_file(layout, batch):
    lens, homes, ranks = batch
    plan = plan_routes(lens, homes, ranks=ranks, layout=layout, heads=24, cost=COST)
    plan.check()
    assert RoutingPlan.from_json(plan.to_json()).to_dict() == plan.to_dict()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n_ranks": 0}, "n_ranks 0 of a plan must be a whole number of at least 1"),
        ({"n_ranks": "4"}, "n_ranks '4'"),
        ({"len_C": [10, 4]}, "of one size, not 3 seq_C, 2 len_C"),
        ({"len_C": [10, 4, 0]}, "chunk 2 of the plan has len 0, not 1 to"),
        ({"len_C": [10, 4, 4.5]}, "len_C of a plan must be a list of whole numbers"),
        ({"len_C": [10, 4, 2**63]}, "below 2\\^63"),
        ({"host_C": [0, 2, 4]}, "chunk 2 of the plan has host 4, not 0 to 3"),
        ({"home_C": [-1, 1, 1]}, "chunk 0 of the plan has home -1"),
        ({"home_C": [1, 1, 0]}, "out of order"),
        ({"seq_C": [1, 0, 1]}, "two homes"),
        ({"seq_C": [0, 0, 0], "home_C": [0, 1, 1]}, "two homes"),
        ({"host_C": [0, 2, 2]}, "two chunks of one sequence of the plan have the same host"),
        ({"seq_D": [0, 0, 0]}, "a plan has the keys n_ranks, seq_C"),
    ],
)
def test_what_is_no_plan_is_refused_in_words(plan, change, said):
    with pytest.raises(ValueError, match=said):
        RoutingPlan.from_dict(plan.to_dict() | change)


def test_a_text_that_is_no_plan_is_refused():
    for text in ("[1]", "nonsense", "{}"):
        with pytest.raises(ValueError, match=r"keys n_ranks|Expecting value"):
            RoutingPlan.from_json(text)


def test_a_plan_for_1024_ranks_survives_json():
    generator = np.random.default_rng(0)
    lens, homes = generator.integers(1, 30_000, 4096), generator.integers(0, 1024, 4096)
    plan = plan_routes(lens, homes, ranks=1024, layout="g8n128", heads=24, cost=COST)
    again = RoutingPlan.from_json(json.dumps(json.loads(plan.to_json())))
    assert again.n_ranks == 1024
    for name in ("seq_C", "len_C", "home_C", "host_C"):
        assert (getattr(again, name) == getattr(plan, name)).all()
        assert getattr(again, name).dtype == np.int64


@settings(max_examples=300, deadline=None)
@given(batches(max_ranks=16))
def test_what_is_sent_is_what_others_receive(batch):
    lens, homes, ranks = batch
    plan = plan_routes(lens, homes, ranks=ranks, layout="elastic", heads=24, cost=COST)
    table_RR = plan.tokens_RR()
    assert (table_RR.sum(0) == plan.tokens_R()).all()
    assert (table_RR.sum(1) == np.bincount(homes, lens, minlength=ranks)).all()
    stays = table_RR.trace() / lens.sum() if len(lens) else 1.0
    assert plan.moved() == pytest.approx(1 - stays)


@pytest.mark.parametrize(
    ("lens", "homes", "said"),
    [
        ([5, 0], [0, 1], "sequence 1 has length 0; lengths are at least 1"),
        ([5, -7], [0, 1], "length -7"),
        ([5, 5], [0, 4], "sequence 1 has home 4; with 4 ranks homes are 0 to 3"),
        ([5, 5], [-1, 0], "home -1"),
        ([5, 5], [0], "same size"),
        ([5.5], [0], "lengths of type float64 must be integers"),
    ],
)
@pytest.mark.parametrize("layout", ["none", "g1n4", "elastic"])
def test_batches_that_cannot_be_are_refused_in_words(layout, lens, homes, said):
    with pytest.raises(ValueError, match=said):
        plan_routes(lens, homes, ranks=4, layout=layout, heads=4, cost=LINEAR)


@pytest.mark.parametrize(("layout", "chunk"), [("none", 100), ("g1n4", 100), ("g2n2", 50), ("elastic", 25)])
def test_a_cap_below_the_smallest_chunk_of_the_longest_sequence_is_refused(layout, chunk):
    with pytest.raises(ValueError, match=f"max_tokens={chunk - 1} is below {chunk}, the smallest chunk"):
        plan_micro_steps([100, 3], [0, 1], ranks=4, layout=layout, heads=4, cost=LINEAR, max_tokens=chunk - 1)
    plans = plan_micro_steps([100, 3], [0, 1], ranks=4, layout=layout, heads=4, cost=LINEAR, max_tokens=chunk)
    assert max(plan.peak_tokens() for plan in plans) <= chunk


def test_a_batch_that_one_step_cannot_hold_says_how_to_go_on():
    with pytest.raises(ValueError, match="plan_micro_steps"):
        plan_routes([60, 60, 60], [0, 0, 0], ranks=2, layout="none", heads=2, cost=LINEAR, max_tokens=60)


def test_a_batch_is_cut_into_no_more_micro_steps_than_it_needs():
    # Two steps would have the tokens for it, but no two of the three sequences fit together.
    plans = plan_micro_steps(
        [40, 40, 40], [0] * 3, ranks=2, layout="none", heads=2, cost=LINEAR, max_tokens=60
    )
    assert [plan.tokens_R().tolist() for plan in plans] == [[40, 0]] * 3
    plans = plan_micro_steps(
        [40, 40, 40], [0] * 3, ranks=2, layout="elastic", heads=2, cost=LINEAR, max_tokens=60
    )
    assert len(plans) == 1 and plans[0].peak_tokens() == 60


@settings(max_examples=200, deadline=None)
@given(batches(max_ranks=12))
@pytest.mark.parametrize("layout", ["none", "g1n1", "elastic"])
def test_micro_steps_are_one_partition_under_the_cap(layout, batch):
    lens, homes, ranks = batch
    widest = split_degrees(24, ranks, 8)[-1] if layout == "elastic" else 1
    cap = -(-int(lens.max(initial=1)) // widest)  # the least that is not refused
    plans = plan_micro_steps(lens, homes, ranks=ranks, layout=layout, heads=24, cost=COST, max_tokens=cap)
    whole = RoutingPlan.of_pieces(
        ranks,
        homes,
        *(np.concatenate([getattr(plan, name) for plan in plans]) for name in ("seq_C", "len_C", "host_C")),
    )
    is_partition(whole, lens, homes, heads=24, domain=8)
    assert all(plan.n_ranks == ranks and plan.peak_tokens() <= cap for plan in plans)
    assert len(plans) >= -(-lens.sum() // (cap * ranks)) if len(lens) else len(plans) == 1


@pytest.mark.parametrize(
    ("layout", "heads", "ranks", "lens"),
    [("elastic", 4, 15, [3]), ("elastic", 7, 8, [5]), ("g8n1", 8, 8, [7]), ("g8n1", 8, 8, [8, 5])],
)
def test_a_cap_that_no_number_of_micro_steps_meets_is_refused(
    layout: str, heads: int, ranks: int, lens: list[int]
) -> None:
    with pytest.raises(ValueError, match="max_tokens=1 is below"):
        plan_micro_steps(
            np.array(lens),
            np.zeros(len(lens), int),
            ranks=ranks,
            layout=layout,
            heads=heads,
            cost=COST,
            max_tokens=1,
        )
