"""Each rank's share of the global batches, decoded ahead of the training loop.

Every rank computes the whole order and keeps the draws of its streams, so all ranks count the same batches
without a word between them. Worker processes decode what the parent assigns; they own nothing, so their
number changes nothing.
"""

import logging
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from data.config import DataConfig, DataError
from data.decode import Decoder, Ref, make_ref
from data.manifest import Manifest
from data.order import Draw, Order
from data.samples import Report, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LocalBatch:
    """This rank's samples of global batch `number` (from 0); a loader given `state` continues after it."""

    number: int
    samples: list[Sample]
    state: dict[str, Any]  # JSON-able, the same on every rank
    reports: list[str]  # samples of this batch that could not be decoded


class Loader:
    """Iterates over LocalBatch: the samples of the canonical streams that are `rank` modulo `ranks`.

    The order of global batches depends on manifest, seed, batch_tokens and the data's settings alone. A batch
    holds the draws that fit `batch_tokens` text and visual tokens over all ranks. DataError (a ValueError)
    for a rank without a stream, a sample that no batch can hold, and a state that belongs to other data or
    settings; while iterating, when the budget of failures is spent.
    """

    def __init__(
        self,
        config: DataConfig,
        manifest: Manifest,
        *,
        batch_tokens: int,
        rank: int,
        ranks: int,
        seed: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        if not 0 <= rank < ranks:
            raise DataError(f"rank {rank} must lie in 0 to {ranks - 1}")
        if config.streams < ranks:
            raise DataError(f"data.streams={config.streams} must be at least the number of ranks, {ranks}")
        self.config, self.manifest, self.rank, self.ranks = config, manifest, rank, ranks
        self.batch_tokens, self.seed, self.state = batch_tokens, seed, state
        self.order()  # raises before the first batch what is wrong with the data or the state

    def order(self) -> Order:
        return Order(self.config, self.manifest, self.batch_tokens, self.seed, self.state)

    def __iter__(self) -> Iterator[LocalBatch]:
        """Starts where the loader's state says, each time; leaving the loop early ends the workers."""
        ahead: deque[dict[str, Any]] = deque()
        failures = in_a_row = 0
        for decoded in decode_ahead(self.config, self.assign(ahead)):
            state, reports = ahead.popleft(), []
            for item in decoded:
                in_a_row = in_a_row + 1 if isinstance(item, Report) else 0
                if isinstance(item, Report):
                    failures += 1
                    reports.append(str(item))
                    logger.warning("%s", item)
                    check_failures(self.config, failures, in_a_row, item)
            samples = [item for item in decoded if isinstance(item, Sample)]
            yield LocalBatch(state["batches"] - 1, samples, state, reports)

    def assign(self, ahead: deque[dict[str, Any]]) -> Iterator[list[Ref]]:
        """This rank's part of each batch; the state after it waits in `ahead` until the batch is used."""
        for draws, state in self.order():
            ahead.append(state)
            yield [make_ref(self.manifest, draw) for draw in draws if self.owns(draw)]

    def owns(self, draw: Draw) -> bool:
        return draw.stream % self.ranks == self.rank


def decode_ahead(config: DataConfig, parts: Iterator[list[Ref]]) -> Iterator[list[Sample | Report]]:
    """Decoded parts in order, by config.workers processes."""
    yield from DataLoader(
        Decoder.of(config),  # type: ignore[arg-type]  # DataLoader asks for __getitem__ alone
        batch_size=None,
        sampler=parts,
        num_workers=config.workers,
        prefetch_factor=config.prefetch if config.workers else None,
        multiprocessing_context=worker_context() if config.workers else None,
        worker_init_fn=start_worker,
        generator=torch.Generator(),  # else DataLoader draws from the trainer's
        collate_fn=unchanged,
    )


def worker_context() -> Any:
    """Never fork: a parent that has decoded video, or holds threads, would leave locks shut in its children.

    Nor forkserver: its workers watch the server instead of the trainer, and outlive a trainer that is killed.
    """
    return multiprocessing.get_context("spawn")


def start_worker(worker: int) -> None:
    """One thread; and an end with a trainer that was killed before this process began.

    From here on torch watches the parent, but takes for it whoever has adopted the process by now.
    """
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None and os.getppid() != parent.pid:
        os._exit(1)


def unchanged(item: Any) -> Any:
    return item


def check_failures(config: DataConfig, failures: int, in_a_row: int, last: Report) -> None:
    if failures > config.max_failures:
        raise DataError(
            f"{failures} samples could not be decoded, more than data.max_failures={config.max_failures}; "
            f"the last: {last}"
        )
    if in_a_row >= config.max_failures_in_a_row:
        raise DataError(
            f"{in_a_row} samples in a row could not be decoded; data.max_failures_in_a_row="
            f"{config.max_failures_in_a_row} ends the run; the last: {last}"
        )
