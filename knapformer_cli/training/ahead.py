"""The next step, prepared while this one computes: samples read, lengths gathered, plans made."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from data.loader import LocalBatch
from data.samples import Sample
from knapformer import RoutingPlan, gather_lengths
from knapformer_cli.training.batch import GlobalBatch, describe
from knapformer_cli.training.parallel import agree

Planner = Callable[[np.ndarray, np.ndarray], tuple[RoutingPlan, ...]]  # len_S, home_S -> a plan a micro-step


@dataclass(frozen=True, eq=False)
class Prepared:
    """One step: this rank's samples, what all ranks know of the batch, and a plan for each micro-step."""

    samples: list[Sample]
    batch: GlobalBatch
    plans: tuple[RoutingPlan, ...]
    loader_state: dict  # of the loader after this batch
    lost: int  # samples of the batch that no rank could read
    reports: list[str]  # why, for those that this rank met
    data_seconds: float
    plan_seconds: float


def prepare_ahead(
    batches: Iterator[LocalBatch],
    edit: Callable[[list[Sample]], list[Sample]],
    sources: Sequence[str],
    planner: Planner,
    steps: int,
    group: dist.ProcessGroup,
) -> Generator[tuple[Prepared, float], None, None]:
    """Yield up to `steps` steps, each with the seconds that the caller waited; ends early with the data.

    One thread works ahead by one step; its collectives run on `group`, which nobody else may use. An error of
    one rank's data is raised on every rank.
    """

    def prepare() -> Prepared | None:
        begin = time.perf_counter()
        local = agree(lambda: next(batches, None), group)
        if local is None:  # the order is the same on every rank, and so is its end
            return None
        samples = edit(local.samples)
        read = time.perf_counter()
        table_SM, home_S = gather_lengths(describe(samples, sources), group)
        batch = GlobalBatch.of(table_SM, home_S)
        lost = torch.tensor(len(local.reports))
        dist.all_reduce(lost, group=group)
        plans = planner(batch.len_S, batch.home_S)
        planned = time.perf_counter()
        return Prepared(
            samples, batch, plans, local.state, int(lost), local.reports, read - begin, planned - read
        )

    if steps < 1:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        coming: Future[Prepared | None] = thread.submit(prepare)
        for number in range(steps):
            begin = time.perf_counter()
            prepared = coming.result()
            waited = time.perf_counter() - begin
            if prepared is None:
                return
            if number + 1 < steps:
                coming = thread.submit(prepare)
            yield prepared, waited
