"""Laws of attention over whole and split sequences, against one process that holds everything."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint

from knapformer.attention import DomainGroup, bind_attention, make_domain_group
from knapformer.kernels import Packing, choose_kernel
from knapformer.plan import RoutingPlan
from tests.knapformer.collectives import Collectives
from tests.knapformer.random_plans import random_plan, rows_of
from tests.spawn import spawn

HEADS, SIZE, PLANS = 12, 4, 30
KERNEL = choose_kernel("auto", "cpu")


def plan_of(ranks: int, *chunks: tuple[int, int, int, int]) -> RoutingPlan:
    """Chunks as (sequence, tokens, home, host)."""
    return RoutingPlan(ranks, *np.array(chunks, np.int64).reshape(-1, 4).T)


def domains_of(group: dist.ProcessGroup) -> list[DomainGroup]:
    return [make_domain_group(group, width) for width in (dist.get_world_size(group), 2, 3)]


def one_process(plan: RoutingPlan, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lens = np.bincount(np.cumsum(plan.first_C()) - 1, plan.len_C).astype(int)
    return KERNEL(q, k, v, Packing.of(lens, "cpu"))


def compare(
    plan: RoutingPlan, domain: DomainGroup, seed: int, dtype: torch.dtype, recompute: bool, **near
) -> None:
    generator = torch.Generator().manual_seed(seed)
    *qkv, grad = torch.randn(4, int(plan.len_C.sum()), HEADS, SIZE, generator=generator).to(dtype)
    mine = rows_of(plan.host_C, domain.rank, plan.len_C)
    want_in = [x.clone().requires_grad_() for x in qkv]
    want = one_process(plan, *want_in)
    want.backward(grad)

    got_in = [x[mine].requires_grad_() for x in qkv]
    attend = bind_attention(plan, domain, kernel=KERNEL, device="cpu")
    got = checkpoint(attend, *got_in, use_reentrant=False) if recompute else attend(*got_in)
    got.backward(grad[mine])
    torch.testing.assert_close(got, want[mine], **near)
    for a, b in zip(got_in, want_in, strict=True):
        torch.testing.assert_close(a.grad, b.grad[mine], **near)


def any_plan_equals_one_process(group):
    rng = np.random.default_rng(0)
    for domain in domains_of(group):
        for seed in range(PLANS):
            plan = random_plan(rng, dist.get_world_size(group), domain.width)
            compare(plan, domain, seed, torch.float32, recompute=False, rtol=1e-5, atol=1e-5)


def so_it_does_under_activation_checkpointing(group):
    rng = np.random.default_rng(1)
    for domain in domains_of(group):
        for seed in range(PLANS):
            plan = random_plan(rng, dist.get_world_size(group), domain.width)
            compare(plan, domain, seed, torch.float32, recompute=True, rtol=1e-5, atol=1e-5)


def so_it_does_in_bfloat16_within_a_rounding(group):
    rng = np.random.default_rng(2)
    for domain in domains_of(group):
        for seed in range(PLANS):
            plan = random_plan(rng, dist.get_world_size(group), domain.width)
            compare(plan, domain, seed, torch.bfloat16, recompute=False, rtol=2**-7, atol=2**-7)


def shards_are_put_together_in_shard_order_whatever_their_hosts(group):
    last = dist.get_world_size(group) - 1
    plan = plan_of(last + 1, (0, 1, 0, last), (0, 5, 0, 0), (1, 2, last, 0), (1, 3, last, last))
    compare(plan, make_domain_group(group, last + 1), 0, torch.float32, recompute=False, rtol=1e-5, atol=1e-5)


def collectives_of(plan: RoutingPlan, domain: DomainGroup) -> tuple[list[str], list[str]]:
    """Of one layer, forward and backward."""
    attend = bind_attention(plan, domain, kernel=KERNEL, device="cpu")
    tokens = int(plan.len_C[plan.host_C == domain.rank].sum())
    qkv = [torch.randn(tokens, HEADS, SIZE, requires_grad=True) for _ in range(3)]
    with Collectives() as forward:
        out = attend(*qkv)
    with Collectives() as backward:
        out.backward(torch.ones_like(out))
    return forward.names, backward.names


def a_step_without_split_sequences_has_no_collective(group):
    ranks = dist.get_world_size(group)
    plan = plan_of(ranks, (0, 9, 0, ranks - 1), (1, 4, 0, 0), (2, 1, 1, ranks - 1))
    assert collectives_of(plan, make_domain_group(group, ranks)) == ([], [])


def split_sequences_of_all_degrees_share_one_pair_each_way(group):
    ranks = dist.get_world_size(group)
    spread = [(0, 5, 0, host) for host in range(ranks)]
    plan = plan_of(ranks, *spread, (1, 3, 1, 1), (1, 4, 1, 0), (2, 8, 1, 1))
    pair = ["alltoall_base_"] * 2
    assert collectives_of(plan, make_domain_group(group, ranks)) == (pair, pair)


def a_domain_without_split_sequences_takes_no_part_in_its_neighbours_exchange(group):
    plan = plan_of(dist.get_world_size(group), (0, 5, 0, 0), (0, 4, 0, 1), (1, 4, 2, 2), (2, 4, 3, 3))
    domain = make_domain_group(group, 2)
    pair = ["alltoall_base_"] * 2 if domain.first == 0 else []
    assert collectives_of(plan, domain) == (pair, pair)


def whole_sequences_are_attended_while_split_ones_travel(group):
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    plan = plan_of(
        ranks, *[(0, 5, 0, host) for host in range(ranks)], *[(1 + r, 4, 1, r) for r in range(ranks)]
    )
    attend = bind_attention(plan, make_domain_group(group, ranks), kernel=KERNEL, device="cpu")
    qkv = [torch.randn(9, HEADS, SIZE, requires_grad=True) for _ in range(3)]
    with profile() if rank == 0 else nullcontext() as trace:
        attend(*qkv).sum().backward()
    if trace is None:
        return
    sdpa = "aten::_scaled_dot_product_flash_attention_for_cpu"
    order = [
        *("_Depart", sdpa, "_Arrive", sdpa, "_Return"),
        *("_ReturnBackward", f"{sdpa}_backward", "_ArriveBackward", f"{sdpa}_backward", "_DepartBackward"),
    ]
    steps = sorted((event.time_range.start, event.name) for event in trace.events() if event.name in order)
    assert [name for _, name in steps] == order


def heads_that_a_degree_does_not_divide_are_refused_before_any_collective(group):
    ranks = dist.get_world_size(group)
    plan = plan_of(ranks, (0, 5, 0, 0), (0, 4, 0, 1), (1, 6, 1, 1))
    attend = bind_attention(plan, make_domain_group(group, ranks), kernel=KERNEL, device="cpu")
    tokens = int(plan.len_C[plan.host_C == dist.get_rank(group)].sum())
    with (
        Collectives() as sent,
        pytest.raises(ValueError, match="over 2 ranks, which does not divide 3 heads"),
    ):
        attend(*torch.zeros(3, tokens, 3, SIZE))
    assert sent.names == []


def plans_that_no_domain_can_hold_are_refused(group):
    domain = DomainGroup(group, 2, dist.get_rank(group))
    with pytest.raises(ValueError, match=r"sequence 7 is split over ranks 1 and 2, .* domains of 2 ranks"):
        bind_attention(plan_of(4, (7, 5, 0, 1), (7, 4, 0, 2)), domain, kernel=KERNEL, device="cpu")
    with pytest.raises(ValueError, match="two chunks of one sequence have the same host"):
        bind_attention(plan_of(4, (7, 5, 0, 1), (7, 4, 0, 1)), domain, kernel=KERNEL, device="cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor, attend) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).unbind(1)
        return x + self.out(attend(q, k, v).flatten(1))


def fully_sharded_and_checkpointed_blocks_have_the_gradients_of_one_process(group):
    from torch.distributed.fsdp import fully_shard

    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    mesh = dist.init_device_mesh("cpu", (ranks,))
    rng = np.random.default_rng(3)
    domain = make_domain_group(group, ranks)
    for seed in range(6):
        plan = random_plan(rng, ranks, ranks)
        torch.manual_seed(seed)
        width = HEADS * SIZE
        want, got = (nn.ModuleList(Block(width) for _ in range(3)) for _ in range(2))
        got.load_state_dict(want.state_dict())
        for block in got:
            fully_shard(block, mesh=mesh)
        full, target = torch.randn(2, int(plan.len_C.sum()), width)
        mine = rows_of(plan.host_C, rank, plan.len_C)

        x = full
        for block in want:
            x = block(x, lambda q, k, v: one_process(plan, q, k, v))  # noqa: B023
        (x * target).sum().backward()
        y, attend = full[mine], bind_attention(plan, domain, kernel=KERNEL, device="cpu")
        for block in got:
            y = checkpoint(block, y, attend, use_reentrant=False)
        ((y * target[mine]).sum() * ranks).backward()  # FSDP averages
        torch.testing.assert_close(y, x[mine], rtol=1e-5, atol=1e-5)
        for a, b in zip(got.parameters(), want.parameters(), strict=True):
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-5, atol=1e-4)


def test_attention_laws_of_two_ranks():
    spawn(
        [
            any_plan_equals_one_process,
            so_it_does_under_activation_checkpointing,
            shards_are_put_together_in_shard_order_whatever_their_hosts,
            a_step_without_split_sequences_has_no_collective,
            heads_that_a_degree_does_not_divide_are_refused_before_any_collective,
            plans_that_no_domain_can_hold_are_refused,
        ],
        ranks=2,
    )


def test_attention_laws_of_four_ranks():
    spawn(
        [
            any_plan_equals_one_process,
            so_it_does_under_activation_checkpointing,
            so_it_does_in_bfloat16_within_a_rounding,
            split_sequences_of_all_degrees_share_one_pair_each_way,
            a_domain_without_split_sequences_takes_no_part_in_its_neighbours_exchange,
            whole_sequences_are_attended_while_split_ones_travel,
            fully_sharded_and_checkpointed_blocks_have_the_gradients_of_one_process,
        ],
        ranks=4,
    )
