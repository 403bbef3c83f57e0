"""Attention over whole and split sequences alike, by one pair of all-to-alls per layer.

Sequence parallelism in the manner of DeepSpeed-Ulysses (Jacobs et al., arXiv 2309.14509): a sequence split
over g ranks has its tokens scattered and its heads whole outside attention, its tokens whole and H/g heads
inside. Here every sequence has its own g and its own ranks, and all of them share the exchange.

C chunks, T tokens here, H heads, K head size. M is the least common multiple of the degrees: every degree's
share of the heads is a whole number of the M head blocks, so a row of the exchange is (token, block) whatever
the degree. N rows leave (the T x M of split chunks), P rows arrive.
"""

import math
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from knapformer.exchange import runs
from knapformer.kernels import Packing, VarlenKernel
from knapformer.plan import RoutingPlan


@dataclass(frozen=True)
class DomainGroup:
    """A sequence-parallel domain: a block of consecutive ranks of the balanced group, and their own group."""

    group: dist.ProcessGroup
    width: int
    """Ranks of every domain but the last, which may be smaller."""
    rank: int
    """This process in the balanced group."""

    @property
    def first(self) -> int:
        """The domain's first rank in the balanced group."""
        return self.rank // self.width * self.width


def make_domain_group(group: dist.ProcessGroup, domain: int, timeout: timedelta | None = None) -> DomainGroup:
    """This rank's block of `domain` consecutive ranks (the last block may be smaller); collective, once.

    timeout: of its collectives, torch's default for the backend where None.
    Raises ValueError if domain is not positive.
    """
    if domain < 1:
        raise ValueError(f"domain {domain} must be at least 1 rank")
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    blocks = [ranks[first : first + domain] for first in range(0, len(ranks), domain)]
    # A group of its own even where the block is the whole group: attention must not queue behind FSDP.
    return DomainGroup(new_own_group(blocks, dist.get_backend_config(group), timeout), domain, rank)


def new_own_group(
    blocks: list[list[int]], backend: str, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """The new group of this process among disjoint blocks of global ranks; collective over all of them.

    Where the blocks are the whole job, all processes create all groups in one order. Where they are a part
    of it, each creates its own; torch names such groups by how many a process already has, so the members
    must have equally many.
    """
    me = dist.get_rank()
    own = next(block for block in blocks if me in block)
    if sum(map(len, blocks)) < dist.get_world_size():
        return dist.new_group(own, timeout, backend, use_local_synchronization=True)
    groups = [dist.new_group(block, timeout, backend) for block in blocks]
    return groups[blocks.index(own)]


def bind_attention(
    plan: RoutingPlan, domain_group: DomainGroup, *, kernel: VarlenKernel, device: torch.device | str
) -> "BoundAttention":
    """The attention of one step: `attend(q_THK, k_THK, v_THK) -> out_THK`, tokens hosted here in chunk order.

    Computes every index and split once and moves them to the device, so that no layer waits; no collective.
    Raises ValueError, on every rank, if the hosts of a split sequence are not distinct ranks of one domain.
    """
    _check_hosts(plan, domain_group.width)
    return BoundAttention(plan, domain_group, kernel, torch.device(device))


class BoundAttention:
    """A step's attention, bound to its plan; see `bind_attention`."""

    def __init__(
        self, plan: RoutingPlan, domain: DomainGroup, kernel: VarlenKernel, device: torch.device
    ) -> None:
        degree_C, here_C = plan.degree_C(), plan.host_C == domain.rank
        in_domain_C = plan.host_C // domain.width == domain.rank // domain.width
        self.kernel = kernel
        self.degrees = np.unique(degree_C).tolist()
        self.n_tokens = int(plan.len_C[here_C].sum())
        self.whole = Packing.of(plan.len_C[here_C & (degree_C == 1)], device)
        n_blocks = math.lcm(*degree_C[in_domain_C].tolist())
        self.routes = _Routes.of(plan, domain, n_blocks, device) if n_blocks > 1 else None

    def __call__(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
        """[T, H, K] each -> [T, H, K]: every token attends to its whole sequence; differentiable.

        Collective on the domain if any of its sequences is split, else not. Raises ValueError before that, on
        every rank, if a degree of the plan does not divide the heads.
        """
        self._check(q_THK, k_THK, v_THK)
        if self.routes is None:
            return self.kernel(q_THK, k_THK, v_THK, self.whole)
        flight = _Flight(self.routes, q_THK.shape)
        ticket, *qkv = _Depart.apply(flight, q_THK, k_THK, v_THK)
        # Between departure and arrival, in backward too: autograd runs younger nodes first, so the gradients
        # of the split sequences leave before, and land after, the backward of the whole ones.
        whole = self.kernel(qkv[0], qkv[1], qkv[2], self.whole)
        qkv = _Arrive.apply(flight, ticket)
        split = self.kernel(qkv[0], qkv[1], qkv[2], self.routes.packing)
        return _Return.apply(self.routes, split, whole)

    def _check(self, q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> None:
        n_heads = q_THK.shape[1]
        for degree in self.degrees:
            if n_heads % degree:
                raise ValueError(
                    f"a sequence is split over {degree} ranks, which does not divide {n_heads} heads evenly"
                )
        self.kernel.check(q_THK, k_THK, v_THK)
        if len(q_THK) != self.n_tokens:
            raise ValueError(
                f"the plan hosts {self.n_tokens} tokens on this rank, but attention got {len(q_THK)}"
            )


def _check_hosts(plan: RoutingPlan, width: int) -> None:
    first_of_C = plan.first_C().nonzero()[0][np.cumsum(plan.first_C()) - 1]
    for c in np.flatnonzero(plan.host_C // width != plan.host_C[first_of_C] // width)[:1]:
        raise ValueError(
            f"sequence {plan.seq_C[c]} is split over ranks {plan.host_C[first_of_C[c]]} and "
            f"{plan.host_C[c]}, which lie in different domains of {width} ranks"
        )
    if len(np.unique(first_of_C * plan.n_ranks + plan.host_C)) < len(plan.host_C):
        raise ValueError(
            "two chunks of one sequence have the same host; the chunks of a sequence need distinct ranks"
        )


@dataclass(frozen=True, eq=False)
class _Routes:
    """Where the rows of split sequences go, the same for every layer of the step.

    Rows leave sorted by (destination, chunk, block, token), and so arrive by (source, chunk, block, token).
    Inside attention a row's place is (sequence, block, token): every (sequence, block) is a packed sequence
    of H/M heads, so sequences of all degrees share one kernel call.
    """

    group: dist.ProcessGroup
    n_blocks: int
    whole_W: Tensor
    """Which of the T tokens belong to whole sequences."""
    leave_N: Tensor
    """Which of the T x M rows leaves n-th."""
    place_P: Tensor
    """Where inside attention the row that arrives p-th belongs."""
    sent_G: list[int]
    """Rows for each rank of the domain."""
    received_G: list[int]
    packing: Packing

    @classmethod
    def of(cls, plan: RoutingPlan, domain: DomainGroup, n_blocks: int, device: torch.device) -> "_Routes":
        degree_C, offset_C, here_C = plan.degree_C(), plan.offset_C(), plan.host_C == domain.rank
        shard_C = _count_up(degree_C[plan.first_C()])
        total_C = plan.total_C()
        start_C = np.cumsum(plan.len_C * here_C) - plan.len_C * here_C
        share_C = n_blocks // degree_C

        whole, mine = np.flatnonzero(here_C & (degree_C == 1)), np.flatnonzero(here_C & (degree_C > 1))
        packed_C = np.zeros_like(start_C)
        packed_C[mine] = np.cumsum(total_C[mine] * share_C[mine]) - total_C[mine] * share_C[mine]

        # Every pair of a chunk here and a chunk of the same sequence, sorted by (peer's host, chunk).
        chunk, peer = np.repeat(mine, degree_C[mine]), np.repeat(mine - shard_C[mine], degree_C[mine])
        peer = peer + _count_up(degree_C[mine])
        order = np.lexsort((chunk, plan.host_C[peer]))
        chunk, peer = chunk[order], peer[order]
        per_host = np.zeros((2, dist.get_world_size(domain.group)), np.int64)
        np.add.at(per_host[0], plan.host_C[peer] - domain.first, plan.len_C[chunk] * share_C[chunk])
        np.add.at(per_host[1], plan.host_C[peer] - domain.first, plan.len_C[peer] * share_C[chunk])

        # One run of rows per pair and head block.
        block = _count_up(share_C[chunk])
        chunk, peer = np.repeat(chunk, share_C[chunk]), np.repeat(peer, share_C[chunk])
        leave = start_C[chunk] * n_blocks + shard_C[peer] * share_C[peer] + block
        place = packed_C[chunk] + block * total_C[chunk] + offset_C[peer]
        return cls(
            group=domain.group,
            n_blocks=n_blocks,
            whole_W=runs(start_C[whole], plan.len_C[whole], device),
            leave_N=runs(leave, plan.len_C[chunk], device, step=n_blocks),
            place_P=runs(place, plan.len_C[peer], device),
            sent_G=per_host[0].tolist(),
            received_G=per_host[1].tolist(),
            packing=Packing.of(np.repeat(total_C[mine], share_C[mine]), device),
        )


def _count_up(count_P: np.ndarray) -> np.ndarray:
    """0, 1, ... count_P[0] - 1, 0, 1, ... count_P[1] - 1, ..."""
    return np.arange(count_P.sum()) - np.repeat(np.cumsum(count_P) - count_P, count_P)


class _Flight:
    """Queries, keys and values, or their gradients, under way: started by one node, landed by the next.

    The nodes are joined by an empty tensor, so nobody can read rows that have not arrived.
    """

    def __init__(self, routes: _Routes, shape: torch.Size) -> None:
        self.routes = routes
        self.row_shape = (shape[1] // routes.n_blocks, shape[2])
        self.under_way: list[Any] = []

    def rows(self, x: Tensor) -> Tensor:
        """[any tokens, any heads, K] -> [rows, (H/M)*K]."""
        return x.reshape(x.shape[0] * x.shape[1] // self.row_shape[0], math.prod(self.row_shape))

    def depart(self, xs: list[Tensor], homewards: bool) -> None:
        outbox = torch.stack(xs, 1)
        inbox, work = _all_to_all(self.routes, outbox, homewards)
        self.under_way = [inbox, work, outbox]  # the outbox must live until its rows have left

    def land(self) -> list[Tensor]:
        inbox, work, _ = self.under_way
        work.wait()
        self.under_way = []
        return list(inbox.unbind(1))


def _all_to_all(routes: _Routes, outbox: Tensor, homewards: bool) -> tuple[Tensor, dist.Work]:
    sent, received = (routes.received_G, routes.sent_G) if homewards else (routes.sent_G, routes.received_G)
    inbox = outbox.new_empty(sum(received), *outbox.shape[1:])
    work = dist.all_to_all_single(
        inbox.view(torch.uint8), outbox.view(torch.uint8), received, sent, routes.group, async_op=True
    )
    return inbox, work


class _Depart(torch.autograd.Function):
    """Sends the split sequences' rows and hands on the whole sequences' tokens."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, *qkv_THK: Tensor) -> tuple[Tensor, ...]:
        ctx.flight, ctx.shape, routes = flight, qkv_THK[0].shape, flight.routes
        flight.depart([flight.rows(x).index_select(0, routes.leave_N) for x in qkv_THK], homewards=False)
        return qkv_THK[0].new_empty(0), *(x.index_select(0, routes.whole_W) for x in qkv_THK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, *whole_grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(
            _merge(ctx.flight.routes, rows, whole, ctx.shape)
            for rows, whole in zip(ctx.flight.land(), whole_grads, strict=True)
        )


class _Arrive(torch.autograd.Function):
    """Lands the split sequences' rows: all their tokens, this rank's heads."""

    @staticmethod
    def forward(ctx: Any, flight: _Flight, ticket: Tensor) -> tuple[Tensor, ...]:
        ctx.flight = flight
        place_P = flight.routes.place_P
        return tuple(
            x.new_empty(x.shape).index_copy_(0, place_P, x).view(len(x), *flight.row_shape)
            for x in flight.land()
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor]:
        flight = ctx.flight
        flight.depart([flight.rows(g).index_select(0, flight.routes.place_P) for g in grads], homewards=True)
        return None, grads[0].new_empty(0)


class _Return(torch.autograd.Function):
    """Brings the split sequences' outputs back to their tokens and joins the outputs of the whole ones."""

    @staticmethod
    def forward(ctx: Any, routes: _Routes, split: Tensor, whole: Tensor) -> Tensor:
        ctx.routes, ctx.shape = routes, split.shape
        # Saved for activation checkpointing, which stops recomputing at the last saved tensor: with this one
        # every rank recomputes up to here, so all of them run the same collectives, whatever they host.
        ctx.save_for_backward(routes.leave_N)
        inbox, work = _all_to_all(routes, split.flatten(1).index_select(0, routes.place_P), homewards=True)
        work.wait()
        n_tokens = len(inbox) // routes.n_blocks + len(whole)
        return _merge(routes, inbox, whole, torch.Size((n_tokens, *whole.shape[1:])))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THK: Tensor) -> tuple[None, Tensor, Tensor]:
        (leave_N,), routes = ctx.saved_tensors, ctx.routes
        row = math.prod(ctx.shape[1:])
        rows = grad_THK.reshape(grad_THK.shape[0] * routes.n_blocks, row).index_select(0, leave_N)
        inbox, work = _all_to_all(routes, rows, homewards=False)
        whole = grad_THK.index_select(0, routes.whole_W)
        work.wait()
        split = inbox.new_empty(inbox.shape).index_copy_(0, routes.place_P, inbox)
        return None, split.view(ctx.shape), whole


def _merge(routes: _Routes, rows: Tensor, whole: Tensor, shape: torch.Size) -> Tensor:
    """Rows that came back and tokens that never left -> [T, H, K]."""
    out = whole.new_empty(shape)
    out.view(shape[0] * routes.n_blocks, rows.shape[1]).index_copy_(0, routes.leave_N, rows)
    return out.index_copy_(0, routes.whole_W, whole)
