"""Deals sequences to blocks (sequence-parallel domains), so that every block can be planned on its own.

S sequences, B blocks.
"""

import numpy as np

from knapformer.planners.job import Job


def deal(job: Job, choice_S: np.ndarray) -> np.ndarray:
    """[S] block of each sequence: load and attention even over blocks, at home what can be.

    choice_S: [S] index of the degree by which a sequence will at least be split.
    Split ones first, costliest first: at home while load and attention there stay below their shares, else
    where `choose` says. Then blocks keep of their own whole ones, costliest first, what they can, and the
    rest is spread: pieces rich in attention go where most of it is missing, others where most room is. One
    order for two resources would leave one of them uneven.
    """
    cost_S = job.whole_S.copy()
    long = np.flatnonzero(choice_S)
    cost_S[long] = job.heads_S[long] + np.array(job.slopes)[choice_S[long]] * job.len_S[long]
    block_S, trays = np.full(len(cost_S), -1), _Trays(job, cost_S)
    order = np.argsort(-cost_S, kind="stable")
    for seqs, eager in ((order[choice_S[order] > 0], True), (order[choice_S[order] == 0], False)):
        trays.expect(int(job.heads_S[seqs].sum()), int(cost_S[seqs].sum()))
        rest = []
        for seq in seqs.tolist():
            block = trays.home[seq]
            if not trays.holds(block, seq):
                if not eager:
                    rest.append(seq)
                    continue
                block = trays.choose(seq)
            trays.put(block, seq)
            block_S[seq] = block
        for seq in rest:
            block_S[seq] = block = trays.choose(seq)
            trays.put(block, seq)
    _level(job, block_S, cost_S, choice_S == 0)
    return block_S


def _level(job: Job, block_S: np.ndarray, cost_S: np.ndarray, whole_S: np.ndarray) -> None:
    """Swap whole sequences of the fullest block for those of the emptiest, until all are within the goal.

    Of the swaps that bring both within it, the one that shifts least attention.
    """
    size_B = np.bincount(job.block_R)
    room_B = size_B * job.goal - np.bincount(block_S, cost_S, minlength=len(size_B)).astype(np.int64)
    for _ in range(2 * len(size_B)):
        full, empty = int(room_B.argmin()), int(room_B.argmax())
        if room_B[full] >= 0:
            return
        # The last of each is nothing at all: a piece may go without another coming back.
        go, back = (np.append(np.flatnonzero(whole_S & (block_S == b)), -1) for b in (full, empty))
        costs, heads = (np.append(x_S, 0) for x_S in (cost_S, job.heads_S))
        change = costs[go][:, None] - costs[back]
        beyond = np.maximum(np.maximum(-room_B[full] - change, change - room_B[empty]), 0)
        shift = np.abs(heads[go][:, None] - heads[back])
        best = np.lexsort((shift.ravel(), beyond.ravel()))[0]
        i, j = divmod(int(best), len(back))
        if beyond[i, j] >= -room_B[full]:
            return
        for seq, block in ((go[i], empty), (back[j], full)):
            if seq >= 0:
                block_S[seq] = block
        room_B[full] += change[i, j]
        room_B[empty] -= change[i, j]


class _Trays:
    """How far every block is from its share of load, attention and tokens."""

    def __init__(self, job: Job, cost_S: np.ndarray) -> None:
        self.load, self.heads, self.tokens = (x.tolist() for x in (cost_S, job.heads_S, job.len_S))
        self.home = np.array(job.block_R)[job.home_S].tolist()
        self.ranks, self.size_B = job.ranks, np.bincount(job.block_R).tolist()
        self.room_B, self.free_B = ([size * most for size in self.size_B] for most in (job.bound, job.cap))
        self.need_B = [0] * len(self.size_B)

    def expect(self, heads: int, load: int) -> None:
        """Sequences of so much attention and load in sum are dealt next: every block gets its share of it."""
        self.coming = heads, load
        self.need_B = [
            need + size * heads // self.ranks for need, size in zip(self.need_B, self.size_B, strict=True)
        ]

    def holds(self, block: int, seq: int) -> bool:
        """Whether the block needs no more than its shares with the sequence in it."""
        return (
            self.room_B[block] >= self.load[seq]
            and self.need_B[block] >= self.heads[seq]
            and self.free_B[block] >= self.tokens[seq]
        )

    def put(self, block: int, seq: int) -> None:
        self.room_B[block] -= self.load[seq]
        self.need_B[block] -= self.heads[seq]
        self.free_B[block] -= self.tokens[seq]

    def choose(self, seq: int) -> int:
        """The block that most lacks what the sequence is rich in, unless that would be full."""
        if self.heads[seq] * self.coming[1] > self.load[seq] * self.coming[0]:
            block = self.need_B.index(max(self.need_B))
            if self.room_B[block] >= self.load[seq] and self.free_B[block] >= self.tokens[seq]:
                return block
        block = self.room_B.index(max(self.room_B))
        return block if self.free_B[block] >= self.tokens[seq] else self.free_B.index(max(self.free_B))
