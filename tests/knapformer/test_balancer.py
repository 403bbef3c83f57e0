"""Laws of the three-call face."""

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from knapformer import Balancer, Packing, WorkloadModel, choose_kernel, gather_lengths, own_sequences
from tests.knapformer.collectives import Collectives
from tests.spawn import spawn

COST = WorkloadModel.analytic(64)
HEADS, SIZE = 6, 4
LENS = [[70, 3, 1], [], [9, 9]]  # of each rank


def balancer_of(group: dist.ProcessGroup, **how) -> Balancer:
    return Balancer(group, heads=HEADS, cost=COST, device="cpu", **how)


def lengths_and_homes_of_all_ranks_reach_every_rank(group):
    rank = dist.get_rank(group)
    table_SM, home_S = gather_lengths(np.array([[n, 10 * n] for n in LENS[rank]]).reshape(-1, 2), group)
    assert table_SM.tolist() == [[n, 10 * n] for lens in LENS for n in lens]
    assert home_S.tolist() == [0, 0, 0, 2, 2]
    nothing, nobody = gather_lengths(np.zeros((0, 2)), group)
    assert nothing.shape == (0, 2) and nobody.shape == (0,)


def tables_of_different_widths_are_refused_on_every_rank(group):
    with pytest.raises(ValueError, match=r"not \[2, 2, 1\] by rank"):
        gather_lengths(np.ones((3, 1 if dist.get_rank(group) == 2 else 2)), group)


def lengths_that_one_rank_gets_wrong_are_refused_on_every_rank(group):
    balancer = balancer_of(group)
    for wrong in ([5.5], [[3, 4]], [0], [-2]):
        with pytest.raises(ValueError, match=r"rank 2 must be|is at least|at least 1"):
            balancer.plan(wrong if dist.get_rank(group) == 2 else [4, 4])
    balancer.close()


def groups_made_before_by_some_ranks_alone_do_no_harm(group):
    if dist.get_rank(group) == 0:
        dist.new_group([0], use_local_synchronization=True)
    assert len(balancer_of(group, layout="g3n1").plan([30]).seq_C) == 9


def three_calls_equal_attention_at_home_whatever_the_layout(group):
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    x, grad = torch.randn(2, sum(LENS[rank]), HEADS * SIZE)
    want_in = x.clone().requires_grad_()
    q = want_in.unflatten(-1, (HEADS, SIZE))
    want = choose_kernel("sdpa", "cpu")(q, q, q, Packing.of(LENS[rank], "cpu")).flatten(1)
    want.backward(grad)
    for layout in ("none", "g1n3", "g3n1", "g1n1+g2n1", "elastic"):
        balancer = balancer_of(group, layout=layout)
        got_in = x.clone().requires_grad_()
        plan = balancer.plan(LENS[rank])
        q = balancer.route(got_in, plan).unflatten(-1, (HEADS, SIZE))
        got = balancer.restore(balancer.attend(plan)(q, q, q).flatten(1), plan)
        got.backward(grad)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(got_in.grad, want_in.grad, rtol=1e-5, atol=1e-5)


def several_tensors_of_any_dtype_share_one_exchange_and_return_bit_for_bit(group):
    rank = dist.get_rank(group)
    balancer = balancer_of(group)
    plan = balancer.plan(LENS[rank])
    n_tokens, n_chunks = sum(LENS[rank]), int((plan.home_C == rank).sum())
    features = torch.randn(n_tokens, 5).bfloat16().requires_grad_()
    ids, conditions = torch.arange(n_tokens), torch.randn(n_chunks, 2)
    with Collectives() as sent:
        routed = balancer.route([features, ids, (conditions, np.ones_like(plan.len_C))], plan)
    assert sent.names == ["alltoall_base_"]
    back = balancer.restore([*routed[:2], (routed[2], np.ones_like(plan.len_C))], plan)
    torch.testing.assert_close(back, [features, ids, conditions], rtol=0, atol=0)


def bad_lengths_of_one_rank_are_refused_on_every_rank(group):
    lens = [5, 0] if dist.get_rank(group) == 1 else [5]
    with pytest.raises(ValueError, match="sequence 2 has length 0"):
        balancer_of(group).plan(lens)


def too_many_tokens_are_refused_on_every_rank(group):
    lens = [50] if dist.get_rank(group) == 1 else [1]
    with pytest.raises(ValueError, match="max_tokens"):
        balancer_of(group, max_tokens=10).plan(lens)


def micro_steps_add_up_to_the_whole_batch(group):
    rank = dist.get_rank(group)
    torch.manual_seed(rank)
    x, target = torch.randn(2, sum(LENS[rank]), HEADS * SIZE)
    starts = np.cumsum([0, *LENS[rank]])
    want, got = torch.nn.Linear(HEADS * SIZE, HEADS * SIZE), torch.nn.Linear(HEADS * SIZE, HEADS * SIZE)
    for linear in (want, got):
        torch.nn.init.constant_(linear.weight, 0.1)
        torch.nn.init.constant_(linear.bias, 0.2)
    tokens = sum(map(sum, LENS))

    q = want(x).unflatten(-1, (HEADS, SIZE))
    out = choose_kernel("sdpa", "cpu")(q, q, q, Packing.of(LENS[rank], "cpu")).flatten(1)
    ((out - target).square().sum() / tokens).backward()

    balancer = balancer_of(group, max_tokens=24)
    plans = balancer.plan_micro_steps(LENS[rank])
    assert len(plans) > 1 and max(plan.peak_tokens() for plan in plans) <= 24
    ahead = balancer.plan_micro_steps_ahead(LENS[rank]).result()
    assert [plan.to_dict() for plan in ahead] == [plan.to_dict() for plan in plans]
    own = own_sequences(plans, rank)
    assert sorted(np.concatenate(own)) == list(range(len(LENS[rank])))
    for plan, seqs in zip(plans, own, strict=True):
        rows = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in seqs] or [np.zeros(0, int)])
        here, there = balancer.route([x[rows], target[rows]], plan)
        q = got(here).unflatten(-1, (HEADS, SIZE))
        out = balancer.attend(plan)(q, q, q).flatten(1)
        ((out - there).square().sum() / tokens).backward()
    for a, b in zip(got.parameters(), want.parameters(), strict=True):
        grads = torch.stack([a.grad, b.grad])
        dist.all_reduce(grads, group=group)
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


def what_no_group_can_do_is_refused_before_any_collective(group):
    with Collectives() as sent:
        for wrong in ({"layout": "g2n1"}, {"layout": "g9"}, {"domain": 0}, {"kernel": "flash2"}):
            with pytest.raises(ValueError, match=r"g2n1|g9|domain|flash2"):
                balancer_of(group, **wrong)
    assert sent.names == []


def planning_ahead_runs_beside_the_step_and_tells_what_was_waited(group):
    rank, balancer = dist.get_rank(group), balancer_of(group)
    pending = balancer.plan_ahead(LENS[rank])
    while not pending.done():  # the step: other collectives, on another group, on another thread
        time.sleep(0.01)
    dist.all_reduce(torch.zeros(1), group=group)
    plan = pending.result()
    assert pending.seconds_waited < 0.1
    for a, b in zip(vars(plan).values(), vars(balancer.plan(LENS[rank])).values(), strict=True):
        np.testing.assert_array_equal(a, b)

    dist.barrier(group)
    if rank == 1:
        time.sleep(0.5)
    late = balancer.plan_ahead([3])
    late.result()
    assert rank == 1 or late.seconds_waited > 0.3


def every_rank_has_the_same_plan(group):
    rng = np.random.default_rng(dist.get_rank(group))
    balancer = balancer_of(group)
    for _ in range(10):
        plan = balancer.plan(rng.integers(1, 300, rng.integers(0, 6)))
        plans: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(
            plans, {name: np.asarray(value).tolist() for name, value in vars(plan).items()}, group
        )
        assert plans == plans[:1] * len(plans)


def test_balancer_laws():
    spawn(
        [
            lengths_and_homes_of_all_ranks_reach_every_rank,
            tables_of_different_widths_are_refused_on_every_rank,
            lengths_that_one_rank_gets_wrong_are_refused_on_every_rank,
            groups_made_before_by_some_ranks_alone_do_no_harm,
            three_calls_equal_attention_at_home_whatever_the_layout,
            several_tensors_of_any_dtype_share_one_exchange_and_return_bit_for_bit,
            bad_lengths_of_one_rank_are_refused_on_every_rank,
            too_many_tokens_are_refused_on_every_rank,
            micro_steps_add_up_to_the_whole_batch,
            what_no_group_can_do_is_refused_before_any_collective,
            planning_ahead_runs_beside_the_step_and_tells_what_was_waited,
            every_rank_has_the_same_plan,
        ],
        ranks=3,
    )
