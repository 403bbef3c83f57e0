"""The next step, prepared while this one computes: samples read, lengths gathered, plans made."""

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from data.loader import LocalBatch
from data.samples import Sample
from knapformer import RoutingPlan, gather_lengths
from knapformer_cli.training import preempt
from knapformer_cli.training.batch import GlobalBatch, describe
from knapformer_cli.training.pace import Pace
from knapformer_cli.training.parallel import attempt, share_error

Planner = Callable[[np.ndarray, np.ndarray], tuple[RoutingPlan, ...]]  # len_S, home_S -> a plan a micro-step
READ, ENDED, FAILED = range(3)  # what became of a rank's next batch


@dataclass(frozen=True, eq=False)
class Prepared:
    """One step: this rank's samples, what all ranks know of the batch, and a plan for each micro-step."""

    samples: list[Sample]
    batch: GlobalBatch
    plans: tuple[RoutingPlan, ...]
    loader_state: dict  # of the loader after this batch
    lost: int  # samples of the batch that no rank could read
    data_seconds: float
    plan_seconds: float
    pace_R2: np.ndarray  # pieces of work and nanoseconds of every rank so far (pace.py)


@dataclass(frozen=True)
class Preempted:
    """In place of a step: a signal asked some rank to save and end, and now all ranks know."""

    signal: int


def prepare_ahead(
    batches: Iterator[LocalBatch],
    edit: Callable[[list[Sample]], list[Sample]],
    sources: Sequence[str],
    planner: Planner,
    pace: Pace,
    steps: int,
    group: dist.ProcessGroup,
) -> Generator[tuple[Prepared | Preempted, float], None, None]:
    """Yield up to `steps` steps, each with the seconds that the caller waited.

    Ends early with the data, and with Preempted in place of a step. One thread works ahead by one step; its
    collectives run on `group`, which nobody else may use. An error of one rank's data is raised on all.
    """

    def prepare() -> Prepared | Preempted | None:
        begin = time.perf_counter()
        local, message = attempt(lambda: next(batches, None))
        samples, lost_here = (edit(local.samples), len(local.reports)) if local else ([], 0)
        read = time.perf_counter()
        state = READ if local else ENDED if message is None else FAILED
        header = (state, lost_here, preempt.asked(), *pace.total)
        header_RM, table_SM, home_S = gather_with_header(header, describe(samples, sources), group)
        if ENDED in header_RM[:, 0]:  # the order is the same on every rank, and so is its end
            return None
        if asked := int(header_RM[:, 2].max()):  # also where the signal ended a decoding process
            return Preempted(asked)
        if FAILED in header_RM[:, 0] or local is None:
            share_error(message, group)
            raise AssertionError("a rank that failed has said why")
        batch = GlobalBatch.of(table_SM, home_S)
        plans = planner(batch.len_S, batch.home_S)
        planned, lost = time.perf_counter(), int(header_RM[:, 1].sum())
        seconds = read - begin, planned - read
        return Prepared(samples, batch, plans, local.state, lost, *seconds, header_RM[:, 3:5])

    if steps < 1:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="ahead") as thread:
        coming: Future[Prepared | Preempted | None] = thread.submit(prepare)
        for number in range(steps):
            begin = time.perf_counter()
            prepared = coming.result()
            waited = time.perf_counter() - begin
            if prepared is None:
                return
            if number + 1 < steps and isinstance(prepared, Prepared):
                coming = thread.submit(prepare)
            yield prepared, waited
            if isinstance(prepared, Preempted):
                return


def gather_with_header(
    header: Sequence[int], local_SM: np.ndarray, group: dist.ProcessGroup
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All ranks' (header_RM, table_SM, home_S): a few numbers of each rank ride along as its first rows."""
    columns = local_SM.shape[1]
    rows = -(-len(header) // columns)
    first = np.zeros((rows, columns), np.int64)
    first.flat[: len(header)] = header
    table_SM, home_S = gather_lengths(np.concatenate([first, local_SM]), group)
    start_R = np.searchsorted(home_S, np.arange(home_S[-1] + 1))
    first_N = (start_R[:, None] + np.arange(rows)).ravel()
    header_RM = table_SM[first_N].reshape(len(start_R), rows * columns)
    return header_RM, np.delete(table_SM, first_N, axis=0), np.delete(home_S, first_N)
