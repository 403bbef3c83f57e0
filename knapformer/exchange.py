"""Move rows of tensors from the ranks that hold them at home to the ranks that host them, and back.

C chunks, P runs of rows, N rows, T tokens here, D features.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from knapformer.plan import RoutingPlan

Part = tuple[Tensor, np.ndarray]


def route_rows(parts: Sequence[Part], plan: RoutingPlan, group: dist.ProcessGroup) -> list[Tensor]:
    """Send several tensors from home to their hosts in ONE all-to-all; collective, not differentiable.

    Each part is (the rows held at home in chunk order, rows_C: how many rows of this tensor belong to each of
    the plan's chunks, the same on every rank). Any dtypes and trailing shapes, each moved in its own width.
    Returns for every part the rows of the chunks hosted here, in chunk order.
    Raises ValueError if a part holds another number of rows than its rows_C states.
    """
    with torch.no_grad():
        return _exchange(parts, plan, group, homewards=False)


def restore_rows(parts: Sequence[Part], plan: RoutingPlan, group: dist.ProcessGroup) -> list[Tensor]:
    """Send several tensors from their hosts back home in ONE all-to-all: the inverse of `route_rows`."""
    with torch.no_grad():
        return _exchange(parts, plan, group, homewards=True)


def route(x_TD: Tensor, plan: RoutingPlan, group: dist.ProcessGroup) -> Tensor:
    """Send one row per token to its host, differentiably: home chunk order -> host chunk order.

    Any dtype and trailing shape; the gradient travels back in the gradient's own dtype. Collective.
    """
    return route_parts([(x_TD, plan.len_C)], plan, group)[0]


def restore(y_TD: Tensor, plan: RoutingPlan, group: dist.ProcessGroup) -> Tensor:
    """Send one row per token back home, differentiably: host chunk order -> home chunk order. Collective."""
    return restore_parts([(y_TD, plan.len_C)], plan, group)[0]


def route_parts(parts: Sequence[Part], plan: RoutingPlan, group: dist.ProcessGroup) -> list[Tensor]:
    """`route_rows` with gradients: one all-to-all forward, one backward for those parts that need it.

    Every rank must pass the same parts with the same `requires_grad`.
    """
    return list(_Exchange.apply(plan, group, False, [rows_C for _, rows_C in parts], *(x for x, _ in parts)))


def restore_parts(parts: Sequence[Part], plan: RoutingPlan, group: dist.ProcessGroup) -> list[Tensor]:
    """`restore_rows` with gradients: the transpose of `route_parts`."""
    return list(_Exchange.apply(plan, group, True, [rows_C for _, rows_C in parts], *(y for y, _ in parts)))


def runs(first_P: np.ndarray, count_P: np.ndarray, device: torch.device, step: int = 1) -> Tensor:
    """[N] int64 on the device: for every run p the count_P[p] numbers first_P[p], first_P[p] + step, ...

    Only the P runs travel to the device, where they are expanded without waiting for it.
    """
    n_rows = int(count_P.sum())
    shift_P = first_P - step * (np.cumsum(count_P) - count_P)
    shift, count = torch.from_numpy(np.stack([shift_P, count_P]).astype(np.int64)).to(device)
    return torch.repeat_interleave(shift, count, output_size=n_rows).add_(
        torch.arange(n_rows, device=device), alpha=step
    )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        plan: RoutingPlan,
        group: dist.ProcessGroup,
        homewards: bool,
        rows: list[np.ndarray],
        *xs: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.plan, ctx.group, ctx.homewards, ctx.rows = plan, group, homewards, rows
        ys = _exchange(list(zip(xs, rows, strict=True)), plan, group, homewards)
        needed = ctx.needs_input_grad[4:]
        ctx.mark_non_differentiable(*(y for y, need in zip(ys, needed, strict=True) if not need))
        return tuple(ys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[4:]
        parts = [part for part, need in zip(zip(grads, ctx.rows, strict=True), needed, strict=True) if need]
        back = iter(_exchange(parts, ctx.plan, ctx.group, not ctx.homewards))
        return None, None, None, None, *(next(back) if need else None for need in needed)


def _exchange(
    parts: Sequence[Part], plan: RoutingPlan, group: dist.ProcessGroup, homewards: bool
) -> list[Tensor]:
    """Rows in chunk order -> rows in chunk order at the other end.

    Sorting home's chunks by host is the only permutation: what a host receives, home by home, already is in
    chunk order. On the way back the host sends as it holds, and home undoes its permutation.
    """
    rank = dist.get_rank(group)
    _check_rows(parts, (plan.host_C if homewards else plan.home_C) == rank, rank)
    tables = [plan.table_RR(rows_C) for _, rows_C in parts]
    if homewards:
        ys = _all_to_all(
            [y for y, _ in parts], [t[:, rank] for t in tables], [t[rank] for t in tables], group
        )
        index = [_by_host(plan, rows_C, rank, y.device) for y, rows_C in parts]
        return [torch.empty_like(y).index_copy_(0, i_N, y) for y, i_N in zip(ys, index, strict=True)]
    xs = [x.index_select(0, _by_host(plan, rows_C, rank, x.device)) for x, rows_C in parts]
    return _all_to_all(xs, [t[rank] for t in tables], [t[:, rank] for t in tables], group)


def _by_host(plan: RoutingPlan, rows_C: np.ndarray, rank: int, device: torch.device) -> Tensor:
    """[N] home's rows, held in chunk order, sorted by (host, chunk)."""
    mine_C = plan.home_C == rank
    count_P = rows_C[mine_C]
    order_P = np.argsort(plan.host_C[mine_C], kind="stable")
    return runs((np.cumsum(count_P) - count_P)[order_P], count_P[order_P], device)


def _check_rows(parts: Sequence[Part], here_C: np.ndarray, rank: int) -> None:
    for i, (x, rows_C) in enumerate(parts):
        if len(x) != rows_C[here_C].sum():
            raise ValueError(
                f"tensor {i} of the exchange has {len(x)} rows on rank {rank}; "
                f"by the plan this rank must hand in {rows_C[here_C].sum()}"
            )


def _all_to_all(
    xs: list[Tensor], sent: list[np.ndarray], received: list[np.ndarray], group: dist.ProcessGroup
) -> list[Tensor]:
    """xs[i] in rank order, sent[i][r] of its rows for rank r -> the received rows, in rank order.

    On the wire bytes lie by (rank, tensor): each pair of ranks exchanges one piece, whatever the tensors.
    """
    if not xs:
        return []
    width = [x.element_size() * math.prod(x.shape[1:]) for x in xs]
    sent_RI = np.stack([n_R * w for n_R, w in zip(sent, width, strict=True)], 1)
    received_RI = np.stack([n_R * w for n_R, w in zip(received, width, strict=True)], 1)
    pieces = [_bytes(x).split(sent_R.tolist()) for x, sent_R in zip(xs, sent_RI.T, strict=True)]
    outbox = torch.cat([piece for pieces_of_rank in zip(*pieces, strict=True) for piece in pieces_of_rank])
    inbox = outbox.new_empty(received_RI.sum())
    dist.all_to_all_single(inbox, outbox, received_RI.sum(1).tolist(), sent_RI.sum(1).tolist(), group)
    arrived = inbox.split(received_RI.flatten().tolist())
    ys = [x.new_empty(int(n_R.sum()), *x.shape[1:]) for x, n_R in zip(xs, received, strict=True)]
    for i, y in enumerate(ys):
        torch.cat(arrived[i :: len(xs)], out=_bytes(y))
    return ys


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)
