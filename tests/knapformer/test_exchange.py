"""Laws of routing rows to their hosts and back."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from knapformer.exchange import restore, restore_parts, restore_rows, route, route_parts, route_rows, runs
from knapformer.plan import RoutingPlan
from tests.knapformer.collectives import Collectives
from tests.knapformer.random_plans import random_plan, rows_of
from tests.spawn import spawn

PLANS = 12
EXACT = {"rtol": 0, "atol": 0}


def plans_of(group: dist.ProcessGroup, count: int = PLANS) -> list[RoutingPlan]:
    rng = np.random.default_rng(len(dist.get_process_group_ranks(group)))
    return [random_plan(rng, dist.get_world_size(group), domain=4) for _ in range(count)]


def all_rows(rows_C: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same rows on every rank, in chunk order."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(int(rows_C.sum()), *shape, generator=g) * 100).to(dtype)


def tokens_arrive_in_chunk_order_and_return_bit_for_bit(group):
    rank = dist.get_rank(group)
    for seed, plan in enumerate(plans_of(group)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool):
            full = all_rows(plan.len_C, (3,), dtype, seed)
            x = full[rows_of(plan.home_C, rank, plan.len_C)]
            y = route(x, plan, group)
            torch.testing.assert_close(y, full[rows_of(plan.host_C, rank, plan.len_C)], **EXACT)
            torch.testing.assert_close(restore(y, plan, group), x, **EXACT)


def tensors_of_any_width_and_rows_share_one_collective(group):
    rank, rng = dist.get_rank(group), np.random.default_rng(1)
    for seed, plan in enumerate(plans_of(group)):
        rows = [plan.len_C, np.ones_like(plan.len_C), rng.integers(0, 5, len(plan.len_C))]
        full = [
            all_rows(rows_C, shape, dtype, seed)
            for rows_C, shape, dtype in zip(
                rows, [(2, 3), (), (7,)], [torch.bfloat16, torch.int64, torch.uint8], strict=True
            )
        ]
        home = [x[rows_of(plan.home_C, rank, n)] for x, n in zip(full, rows, strict=True)]
        with Collectives() as sent:
            hosted = route_rows(list(zip(home, rows, strict=True)), plan, group)
        assert sent.names == ["alltoall_base_"]
        for y, x, n in zip(hosted, full, rows, strict=True):
            torch.testing.assert_close(y, x[rows_of(plan.host_C, rank, n)], **EXACT)
        back = restore_rows(list(zip(hosted, rows, strict=True)), plan, group)
        torch.testing.assert_close(back, home, **EXACT)


def gradients_travel_the_transposed_way(group):
    rank = dist.get_rank(group)
    for seed, plan in enumerate(plans_of(group)):
        rows = [plan.len_C, np.ones_like(plan.len_C), plan.len_C]
        dtypes = [torch.float32, torch.bfloat16, torch.int64]
        full = [all_rows(n, (2,), dtype, seed) for n, dtype in zip(rows, dtypes, strict=True)]
        grad = [all_rows(n, (2,), dtype, seed + 100) for n, dtype in zip(rows, dtypes, strict=True)]
        for there, here_C, there_C in (
            (route_parts, plan.home_C, plan.host_C),
            (restore_parts, plan.host_C, plan.home_C),
        ):
            x = [f[rows_of(here_C, rank, n)] for f, n in zip(full, rows, strict=True)]
            for leaf in x[:2]:
                leaf.requires_grad_()
            y = there(list(zip(x, rows, strict=True)), plan, group)
            assert [t.requires_grad for t in y] == [True, True, False]
            y[0].mul_(2)  # an output is the caller's own, to be changed in place
            arrived = [g[rows_of(there_C, rank, n)] for g, n in zip(grad, rows, strict=True)]
            with Collectives() as sent:
                torch.autograd.backward(y[:2], arrived[:2])
            assert sent.names == ["alltoall_base_"]
            torch.testing.assert_close(x[0].grad, 2 * grad[0][rows_of(here_C, rank, rows[0])], **EXACT)
            torch.testing.assert_close(x[1].grad, grad[1][rows_of(here_C, rank, rows[1])], **EXACT)


def other_rows_than_the_plans_are_refused(group):
    plan = RoutingPlan(dist.get_world_size(group), *np.array([[0], [5], [0], [1]]))
    with pytest.raises(ValueError, match=r"has 6 rows on rank \d; by the plan this rank must hand in [05]"):
        route(torch.zeros(6, 2), plan, group)


def test_exchange_laws():
    spawn(
        [
            tokens_arrive_in_chunk_order_and_return_bit_for_bit,
            tensors_of_any_width_and_rows_share_one_collective,
            gradients_travel_the_transposed_way,
            other_rows_than_the_plans_are_refused,
        ],
        ranks=3,
    )


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 6)), max_size=8),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_runs_are_the_numbers_of_every_run_in_turn(pairs, step):
    first_P, count_P = np.array(pairs, np.int64).reshape(-1, 2).T
    want = [first + step * i for first, count in pairs for i in range(count)]
    assert runs(first_P, count_P, torch.device("cpu"), step).tolist() == want
