"""The first law of the house on thousands of plans: loss and all gradients are those of one process.

Real gloo ranks route raw inputs, embed them where they land, attend over whole and split sequences, and take
the loss there. Plans of every layout and kind of batch are made before the spawn, for 1 to 4, and 8 ranks.
"""

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from knapformer import (
    DomainGroup,
    Packing,
    RoutingPlan,
    bind_attention,
    choose_kernel,
    make_domain_group,
    plan_routes,
    route,
)
from knapformer.layout import bag_layouts
from tests.knapformer.batches import COST, TRAFFIC
from tests.knapformer.random_plans import random_plan, rows_of
from tests.spawn import spawn

HEADS, SIZE, WIDTH = 24, 2, 4
KERNEL = choose_kernel("sdpa", "cpu")


def lengths(rng: np.random.Generator, ranks: int) -> np.ndarray:
    """Any, all one token, all equal, or one giant among small ones; none at all now and then."""
    count = int(rng.integers(0, 3 * ranks + 1))
    kind = rng.integers(4)
    if kind == 0:
        return rng.integers(1, 20, count)
    if kind == 1:
        return np.ones(count, int)
    if kind == 2:
        return np.full(count, rng.integers(1, 12))
    return np.append(rng.integers(1, 5, count), rng.integers(20, 80))


def planned(rng: np.random.Generator, ranks: int) -> RoutingPlan:
    """A batch planned by one of the layouts, or a plan that no planner of ours would make."""
    kind = rng.integers(5)
    if kind == 0:
        return random_plan(rng, ranks, domain=ranks, most_tokens=20)
    lens = lengths(rng, ranks)
    homes = rng.integers(0, ranks, len(lens))
    if rng.random() < 0.3:
        homes = np.minimum(homes, rng.integers(0, ranks))  # the upper ranks have nothing at home
    bags = bag_layouts(ranks, [1, 2, 3, 4, 6, 8], ranks)
    layout = ["none", str(rng.choice(bags)), "elastic", "elastic"][kind - 1]
    # With COST splits of such short sequences hardly pay; a cap asks for them.
    cap = max(1, -(-int(lens.sum()) // ranks)) * 2 if layout == "elastic" and rng.random() < 0.7 else None
    cost = COST if rng.random() < 0.5 else TRAFFIC
    how = {"ranks": ranks, "heads": HEADS, "cost": cost, "domain": ranks}
    try:
        return plan_routes(lens, homes, layout=layout, max_tokens=cap, **how)
    except ValueError:  # the cap was below what whole tokens allow
        return plan_routes(lens, homes, layout=layout, **how)


def plans(count: int, ranks: int, seed: int) -> list[RoutingPlan]:
    rng = np.random.default_rng(seed)
    return [planned(rng, ranks) for _ in range(count)]


class Layer(nn.Module):
    """Raw inputs [tokens, WIDTH] -> the sum over tokens of their loss."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * HEADS * SIZE), nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x_TD: Tensor, target_TD: Tensor, attend, dtype: torch.dtype) -> Tensor:
        q, k, v = self.qkv(x_TD).unflatten(-1, (3, HEADS, SIZE)).to(dtype).unbind(1)
        return (self.out(attend(q, k, v).flatten(1).float()) - target_TD).square().sum()


def results(layer: Layer, loss: Tensor, x_TD: Tensor) -> Tensor:
    """The loss, then every gradient: of all parameters, and of the raw inputs last; in one row."""
    grads = torch.autograd.grad(loss, [*layer.parameters(), x_TD])
    return torch.cat([loss.detach()[None], *(grad.flatten() for grad in grads)])


def one_process(
    layer: Layer, plan: RoutingPlan, x_TD: Tensor, target_TD: Tensor, dtype: torch.dtype
) -> Tensor:
    lens = np.add.reduceat(plan.len_C, np.flatnonzero(plan.first_C())) if len(plan.len_C) else plan.len_C
    packing, x_TD = Packing.of(lens, "cpu"), x_TD.clone().requires_grad_()
    return results(layer, layer(x_TD, target_TD, lambda q, k, v: KERNEL(q, k, v, packing), dtype), x_TD)


def this_rank(
    layer: Layer,
    plan: RoutingPlan,
    x_TD: Tensor,
    target_TD: Tensor,
    dtype: torch.dtype,
    domain: DomainGroup,
    group,
) -> Tensor:
    """What this rank adds to the results: its sum of losses and gradients, zero for inputs of other homes."""
    home, host = (
        torch.from_numpy(rows_of(rank_C, domain.rank, plan.len_C)) for rank_C in (plan.home_C, plan.host_C)
    )
    mine = x_TD[home].requires_grad_()
    attend = bind_attention(plan, domain, kernel=KERNEL, device="cpu")
    row = results(layer, layer(route(mine, plan, group), target_TD[host], attend, dtype), mine)
    split = len(row) - mine.numel()
    inputs = torch.zeros_like(x_TD)
    inputs[home] = row[split:].view(mine.shape)
    return torch.cat([row[:split], inputs.flatten()])


def compare(plans: list[RoutingPlan], domain: DomainGroup, group, dtype: torch.dtype, near: float) -> None:
    """Sum over ranks once for all the plans; each rank checks some of them against one process."""
    torch.manual_seed(0)
    layer, ranks = Layer(), dist.get_world_size(group)
    raw = [torch.randn(2, int(plan.len_C.sum()), WIDTH) for plan in plans]
    rows = [this_rank(layer, plan, *xs, dtype, domain, group) for plan, xs in zip(plans, raw, strict=True)]
    total = torch.cat(rows)
    dist.all_reduce(total, group=group)
    for i, got in list(enumerate(total.split([len(row) for row in rows])))[domain.rank :: ranks]:
        want = one_process(layer, plans[i], *raw[i], dtype)
        scale = 1 + float(want.abs().max())
        torch.testing.assert_close(got / scale, want / scale, rtol=near, atol=near)


def every_plan_equals_one_process(group, plans_of: dict[int, list[RoutingPlan]]) -> None:
    # From large groups to small: so the members of a group have always made equally many before.
    for ranks, some in sorted(plans_of.items(), reverse=True):
        if dist.get_rank(group) >= ranks:
            return
        members = dist.new_group(list(range(ranks)), use_local_synchronization=True)
        compare(some, make_domain_group(members, ranks), members, torch.float32, near=1e-5)


def so_it_does_in_bfloat16(group, plans_of: dict[int, list[RoutingPlan]]) -> None:
    """Rounded to 8 bits at queries, keys, values and outputs: within 2^-7 of what one process rounds."""
    ranks = dist.get_world_size(group)
    compare(plans_of[ranks][:60], make_domain_group(group, ranks), group, torch.bfloat16, near=2**-7)


def test_thousands_of_plans_on_1_to_4_ranks_have_the_loss_and_gradients_of_one_process():
    plans_of = {1: plans(200, 1, 1), 2: plans(900, 2, 2), 3: plans(400, 3, 3), 4: plans(600, 4, 4)}
    split = [plan for some in plans_of.values() for plan in some if (plan.degree_C() > 1).any()]
    assert len(split) > 700
    spawn([so_it_does_in_bfloat16, every_plan_equals_one_process], 4, plans_of)


def test_plans_on_8_ranks_do_so_too():
    spawn([every_plan_equals_one_process], 8, {8: plans(120, 8, 8)})
