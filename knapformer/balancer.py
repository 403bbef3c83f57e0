"""The face for other trainers: plan, route, attend, restore.

S sequences, M numbers of each, C chunks, T tokens here, D features.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike
from torch import Tensor

from knapformer.attention import BoundAttention, bind_attention, make_domain_group, new_own_group
from knapformer.exchange import Part, restore_parts, route_parts
from knapformer.kernels import choose_kernel
from knapformer.layout import check_layout
from knapformer.plan import RoutingPlan
from knapformer.planners.routes import plan_micro_steps, plan_routes
from knapformer.workload import WorkloadModel


def gather_lengths(local_SM: ArrayLike, group: dist.ProcessGroup) -> tuple[np.ndarray, np.ndarray]:
    """This rank's int64 table of M numbers a sequence -> (all ranks' table_SM, home_S); collective.

    Ranks may have any numbers of sequences, none included; the group must be one for CPU tensors. A thread
    may call this while the device computes, if nobody else uses the group meanwhile.
    Raises ValueError, on every rank, if the tables differ in their number of columns.
    """
    local = torch.from_numpy(np.ascontiguousarray(local_SM, np.int64))
    n_ranks = dist.get_world_size(group)
    shapes = [torch.empty(2, dtype=torch.int64) for _ in range(n_ranks)]
    dist.all_gather(shapes, torch.tensor(local.shape), group)
    count_R, columns_R = torch.stack(shapes, 1).tolist()
    if len(set(columns_R)) > 1:
        raise ValueError(f"every rank must give the same numbers of each sequence, not {columns_R} by rank")
    padded = torch.zeros(max(count_R), columns_R[0], dtype=torch.int64)
    padded[: len(local)] = local
    tables = [torch.empty_like(padded) for _ in range(n_ranks)]
    dist.all_gather(tables, padded, group)
    table_SM = torch.cat([table[:count] for table, count in zip(tables, count_R, strict=True)])
    return table_SM.numpy(), np.repeat(np.arange(n_ranks), count_R)


Planned = TypeVar("Planned", RoutingPlan, tuple[RoutingPlan, ...])


class PendingPlan(Generic[Planned]):
    """A plan, or those of micro-steps, in the making; its wait is the part that the step could not hide."""

    def __init__(self, future: Future[Planned]) -> None:
        self._future: Future[Planned] = future
        self.seconds_waited = 0.0

    def done(self) -> bool:
        """Whether `result` would return at once."""
        return self._future.done()

    def result(self) -> Planned:
        """What was planned, once it is there. Raises the planner's ValueError, the same on every rank."""
        begin = time.perf_counter()
        plan = self._future.result()
        self.seconds_waited += time.perf_counter() - begin
        return plan


class Balancer:
    """Balances the sequences of one group of ranks inside any model: plan, route, attend, restore.

    Its methods are collective: every rank of the group calls them in the same order.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        heads: int,
        cost: WorkloadModel,
        device: torch.device | str,
        layout: str = "elastic",
        domain: int = 8,
        max_tokens: int | None = None,
        kernel: str = "auto",
    ) -> None:
        """Collective, once at start.

        heads: of every attention layer; a sequence is split over degrees that divide them.
        cost: seconds (or FLOP) of a sequence, from `WorkloadModel.analytic` or fitted.
        layout: "none", a bag spec such as "g1n16+g4n4", or "elastic".
        domain: consecutive ranks inside which a sequence is split, e.g. those of a node.
        max_tokens: cap of tokens on any rank, none by default.
        kernel: attention backend, see `choose_kernel`; `self.kernel.name` says which "auto" chose.
        Raises ValueError, before any collective, for a layout, domain or kernel that cannot be.
        """
        n_ranks = dist.get_world_size(group)
        check_layout(layout, ranks=n_ranks, heads=heads, domain=domain)
        self.group, self.device = group, torch.device(device)
        self.kernel = choose_kernel(kernel, self.device)
        how: dict[str, Any] = {"ranks": n_ranks, "layout": layout, "heads": heads, "cost": cost}
        how |= {"domain": domain, "max_tokens": max_tokens}
        self._plan_routes, self._plan_micro_steps = (
            partial(plan_routes, **how),
            partial(plan_micro_steps, **how),
        )
        self._domain = make_domain_group(group, domain)
        # Lengths travel on a group of their own, so that a thread may gather them while the step computes.
        self._cpu_group = new_own_group([dist.get_process_group_ranks(group)], "gloo")
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[..., Any], ArrayLike] | None] = SimpleQueue()
        # A daemon, unlike an executor's thread: a process that fails must be able to end while the lengths of
        # its peers are still awaited.
        Thread(target=self._work, name="knapformer-plan", daemon=True).start()

    def plan(self, lens: ArrayLike) -> RoutingPlan:
        """The plan of a step whose sequences here have `lens` tokens (any number of them, none included).

        Raises ValueError, on every rank, for lengths below 1 or more tokens than `max_tokens` allows.
        """
        return self.plan_ahead(lens).result()

    def plan_ahead(self, lens: ArrayLike) -> PendingPlan[RoutingPlan]:
        """Start planning a later step and return at once; call it before computing the step at hand."""
        future: Future[RoutingPlan] = Future()
        self._jobs.put((future, self._plan_routes, lens))
        return PendingPlan(future)

    def plan_micro_steps(self, lens: ArrayLike) -> tuple[RoutingPlan, ...]:
        """Plans of as few micro-steps as `max_tokens` needs: one where `plan` has one, more where it raises.

        The same number on every rank, and every rank takes all of them, if with no tokens; `own_sequences`
        says which of its sequences each one takes. Its weight is its share of the batch's tokens: divide the
        sum of the token losses by the tokens of all micro-steps, and let gradients add up.
        Raises ValueError, on every rank, for lengths below 1 or a sequence that no degree makes small enough.
        """
        return self.plan_micro_steps_ahead(lens).result()

    def plan_micro_steps_ahead(self, lens: ArrayLike) -> PendingPlan[tuple[RoutingPlan, ...]]:
        """As `plan_ahead`."""
        future: Future[tuple[RoutingPlan, ...]] = Future()
        self._jobs.put((future, self._plan_micro_steps, lens))
        return PendingPlan(future)

    def close(self) -> None:
        """End the planning thread once what was asked of it is done; the balancer plans no more."""
        self._jobs.put(None)

    @overload
    def route(self, x: Tensor, plan: RoutingPlan) -> Tensor: ...
    @overload
    def route(self, x: Sequence[Tensor | Part], plan: RoutingPlan) -> list[Tensor]: ...
    def route(self, x: Tensor | Sequence[Tensor | Part], plan: RoutingPlan) -> Tensor | list[Tensor]:
        """Rows of this rank's tokens, in chunk order -> rows of the tokens it hosts, in chunk order.

        x: [T, ...] of any dtype, or several such tensors, which share one all-to-all; a tensor with other
        than one row a token comes with rows_C, its rows in each of the plan's chunks. Differentiable.
        Raises ValueError if a tensor's rows are not as many as the plan's.
        """
        if isinstance(x, Tensor):
            return route_parts([(x, plan.len_C)], plan, self.group)[0]
        return route_parts(_parts(x, plan), plan, self.group)

    def attend(self, plan: RoutingPlan) -> BoundAttention:
        """The step's attention, `q_THK, k_THK, v_THK -> out_THK`: made once a step, used in all layers."""
        return bind_attention(plan, self._domain, kernel=self.kernel, device=self.device)

    @overload
    def restore(self, y: Tensor, plan: RoutingPlan) -> Tensor: ...
    @overload
    def restore(self, y: Sequence[Tensor | Part], plan: RoutingPlan) -> list[Tensor]: ...
    def restore(self, y: Tensor | Sequence[Tensor | Part], plan: RoutingPlan) -> Tensor | list[Tensor]:
        """The inverse of `route`, bit for bit, and its transpose."""
        if isinstance(y, Tensor):
            return restore_parts([(y, plan.len_C)], plan, self.group)[0]
        return restore_parts(_parts(y, plan), plan, self.group)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, planner, lens = job
            try:
                future.set_result(planner(*self._gathered(lens)))
            except BaseException as error:  # whatever it is, the step that waits must see it
                future.set_exception(error)

    def _gathered(self, lens: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """len_S and home_S of all ranks, or the error of one on all of them."""
        local_S = np.asarray(lens)
        wrong = local_S.size > 0 and (local_S.ndim != 1 or not np.issubdtype(local_S.dtype, np.integer))
        # A rank that raised alone would leave the others waiting: say so in the numbers that all ranks see.
        local_S2 = np.array([[0, 1]]) if wrong else np.stack([local_S.ravel(), np.zeros(local_S.size)], 1)
        table_S2, home_S = gather_lengths(local_S2.astype(np.int64), self._cpu_group)
        for seq in np.flatnonzero(table_S2[:, 1])[:1]:
            raise ValueError(f"the lengths of rank {home_S[seq]} must be a vector of whole numbers of tokens")
        return table_S2[:, 0], home_S


def _parts(xs: Sequence[Tensor | Part], plan: RoutingPlan) -> list[Part]:
    return [(x, plan.len_C) if isinstance(x, Tensor) else x for x in xs]
