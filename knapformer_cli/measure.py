"""Seconds of the real model, forward and backward, on this device, over steps of packed chunks.

A sequence of L tokens split over g ranks is run as one of them sees it: L/g tokens outside attention, and in
attention all L tokens with its share of the heads.

C chunks, T tokens, H heads, K head size, M head blocks (the least common multiple of the degrees).
"""

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from knapformer import Packing, VarlenKernel
from models.tokens import Attend, Tokens, pack_whole


@dataclass(frozen=True)
class Case:
    """A step: (length, degree) of each sequence that this rank has a chunk of. Degrees divide the lengths."""

    chunks: tuple[tuple[int, int], ...]
    held_out: bool = False

    @property
    def tokens(self) -> int:
        return sum(length // degree for length, degree in self.chunks)

    @property
    def squares(self) -> float:
        """Pairs of tokens in this rank's share of attention."""
        return sum(length * length / degree for length, degree in self.chunks)


def fitted_cases(lengths: Sequence[int], degrees: Sequence[int]) -> list[Case]:
    """Every length alone at every degree, and whole ones packed to a quarter and all of the most tokens."""
    alone = [Case(((length, degree),)) for length in lengths for degree in degrees]
    packed = [
        Case(((length, 1),) * count)
        for length in lengths[:-1]
        for count in sorted({lengths[-1] // length // 4, lengths[-1] // length})
        if count > 1
    ]
    return alone + packed


def held_out_cases(
    lengths: Sequence[int], degrees: Sequence[int], count: int = 12, seed: int = 0
) -> list[Case]:
    """Lengths that are not fitted, alone and packed at random; a step has no more tokens than the longest."""
    unit, draw = math.lcm(*degrees), random.Random(seed)
    between = [round_up((low * high) ** 0.5, unit) for low, high in itertools.pairwise(lengths)]
    alone: list[tuple[tuple[int, int], ...]] = [
        ((length, draw.choice(degrees)),) for length in between if length not in lengths
    ]
    packed: list[tuple[tuple[int, int], ...]] = []
    while len(packed) < count:
        room, chunks = draw.uniform(0.25, 1) * lengths[-1], []  # type: float, list[tuple[int, int]]
        for _ in range(16):
            exponent = draw.uniform(math.log(lengths[0]), math.log(lengths[-1]))
            length = round_up(math.exp(exponent), unit)
            degree = draw.choice(degrees) if length >= lengths[-1] // 4 else 1
            if length not in lengths and length / degree <= room:
                room -= length / degree
                chunks.append((length, degree))
        if chunks:
            packed.append(tuple(chunks))
    return [Case(chunks, held_out=True) for chunks in alone + packed]


def round_up(length: float, unit: int) -> int:
    return math.ceil(length / unit) * unit


@dataclass(frozen=True, eq=False)
class Subject:
    """The model to be measured, its attention, and how much of a chunk is caption."""

    model: nn.Module
    heads: int
    channels: int
    kernel: VarlenKernel
    device: torch.device
    caption: int

    def step(self, case: Case) -> Callable[[], None]:
        """Forward and backward of the case on inputs that are made here and now."""
        tokens, attend = self._tokens(case), self.attend(case)

        def run() -> None:
            self.model(tokens, attend).square().mean().backward()

        return run

    def _tokens(self, case: Case) -> Tokens:
        """Each chunk as a sequence of its own: captions go whole to every rank, so here too."""
        tokens_C = [length // degree for length, degree in case.chunks]
        text_C = [min(self.caption, tokens // 4) for tokens in tokens_C]
        visual_C = [tokens - text for tokens, text in zip(tokens_C, text_C, strict=True)]
        return pack_whole(
            [torch.randn(n, self.channels, device=self.device) for n in visual_C],
            [(1, 1, n) for n in visual_C],
            [b"a" * n for n in text_C],
            torch.rand(len(tokens_C), device=self.device),
            self.channels,
        )[0]

    def attend(self, case: Case) -> Attend:
        """Attention of the shapes that `knapformer.attention` makes, on numbers that never travelled."""
        len_C, degree_C = (np.array(x) for x in zip(*case.chunks, strict=True))
        whole_C = degree_C == 1
        n_blocks = math.lcm(*degree_C.tolist())
        whole_T = np.repeat(whole_C, len_C // degree_C)
        whole_W, split_N = (torch.from_numpy(np.flatnonzero(x)).to(self.device) for x in (whole_T, ~whole_T))
        whole = Packing.of(len_C[whole_C], self.device)
        split = Packing.of(np.repeat(len_C[~whole_C], n_blocks // degree_C[~whole_C]), self.device)

        def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
            qkv, blocks = (q_THK, k_THK, v_THK), (-1, self.heads // n_blocks, q_THK.shape[2])
            if n_blocks == 1:
                return self.kernel(*qkv, whole)
            q, k, v = (x.index_select(0, whole_W) for x in qkv)
            near = self.kernel(q, k, v, whole)
            q, k, v = (x.index_select(0, split_N).reshape(blocks) for x in qkv)
            far = self.kernel(q, k, v, split)
            out = q_THK.new_zeros(q_THK.shape).index_copy(0, whole_W, near)
            return out.index_copy(0, split_N, far.view(-1, *q_THK.shape[1:]))

        return attend

    def seconds(self, run: Callable[[], None]) -> float:
        """Seconds of one run: of the GPU, of this thread where one computes, else of the clock.

        Gradients are new in every step, as sharded data parallelism makes them.
        """
        self.model.zero_grad(set_to_none=True)
        alone = self.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.thread_time if alone else time.perf_counter
        self._wait()
        begin = clock()
        run()
        self._wait()
        return clock() - begin

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def grow_lengths(
    subject: Subject, shortest: int, unit: int, patience: float, longest: int | None
) -> Iterator[int]:
    """Lengths from the shortest, doubling up to `longest`, or else until a step takes `patience` seconds.

    At least three; fewer, where the device's memory ends. ValueError where it holds not even three.
    """
    length, count = round_up(shortest, unit), 0
    while longest is None or length <= longest:
        try:
            run = subject.step(Case(((length, 1),)))
            run()
            taken = subject.seconds(run)
        except torch.OutOfMemoryError as error:
            subject.model.zero_grad(set_to_none=True)
            if count < 3:
                raise ValueError(
                    f"the model has no room for a sequence of {length} tokens on this device; lower "
                    "calibrate.shortest, or set parallel.activation_checkpointing=true"
                ) from error
            return
        yield length
        count += 1
        if longest is None and count >= 3 and taken > patience:
            return
        length *= 2


def measure(
    subject: Subject, cases: Sequence[Case], repeats: int, done: Callable[[], None] = lambda: None
) -> list[float]:
    """Median seconds of every case, each run once before; rounds in shuffled order, against drift."""
    times: list[list[float]] = [[] for _ in cases]
    order, draw = list(range(len(cases))), random.Random(0)
    for number in range(repeats + 1):
        draw.shuffle(order)
        for i in order:
            # Inputs are made anew, so that the memory of one case is all that a device must hold.
            taken = subject.seconds(subject.step(cases[i]))
            if number:
                times[i].append(taken)
            done()
    return [statistics.median(x) for x in times]
