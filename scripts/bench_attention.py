"""Busy time and bytes sent of every layout, measured on gloo ranks of one thread each, as a table.

    python scripts/bench_attention.py            # 2 and 4 ranks

Rank 0 loads clips, the others pictures. A step is a stack of plain blocks, forward and backward, between
`route` and `restore`. Busy is CPU time of the rank's own thread, so waiting for others does not count; sent
is what torch's all-to-alls really carry to other ranks; engine is the share of busy time that attention
spends outside its kernels (packing, unpacking, starting exchanges). Wall time needs a free core per rank.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from knapformer import Balancer, Packing, RoutingPlan, WorkloadModel, choose_kernel
from knapformer.attention import BoundAttention

HEADS, SIZE, LAYERS, REPEATS = 12, 16, 2, 3
WIDTH = HEADS * SIZE
STATIC = {2: ["none", "g1n2", "g2n1"], 4: ["none", "g1n4", "g2n2", "g1n2+g2n1", "g4n1"]}


class Block(nn.Module):
    """Attention and an MLP, as heavy as a DiT block of this width."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x_TD: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        q, k, v = self.qkv(x_TD).unflatten(-1, (3, HEADS, SIZE)).unbind(1)
        x_TD = x_TD + self.out(attend(q, k, v).flatten(1))
        return x_TD + self.mlp(x_TD)


class SentBytes(TorchDispatchMode):
    """While active, counts the bytes that all-to-alls carry to other ranks."""

    def __init__(self, rank_in_group: int) -> None:
        super().__init__()
        self.rank, self.total = rank_in_group, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname == "alltoall_base_":
            _, outbox, _, _, splits = args[:5]
            rows = sum(splits) - splits[self.rank]
            self.total += rows * outbox[0:1].numel() * outbox.element_size() if len(outbox) else 0
        return func(*args, **(kwargs or {}))


def lengths(rank: int) -> list[int]:
    """Rank 0 loads two clips, the others ten pictures each."""
    return [1600, 900] if rank == 0 else np.random.default_rng(rank).integers(60, 300, 10).tolist()


def measured_cost(blocks: nn.ModuleList) -> WorkloadModel:
    """Seconds of single sequences through the blocks, fitted on rank 0 and shared."""
    kernel = choose_kernel("auto", "cpu")
    lens, seconds = [64, 256, 1024, 1600], []
    for length in lens:
        packing = Packing.of([length], "cpu")
        x = torch.randn(length, WIDTH)
        for _ in range(2):  # the first warms up
            begin = time.thread_time()
            y = x
            for block in blocks:
                y = block(y, lambda q, k, v: kernel(q, k, v, packing))  # noqa: B023
            y.sum().backward()
            spent = time.thread_time() - begin
        seconds.append(spent)
    shared = [seconds]
    dist.broadcast_object_list(shared, src=0)
    return WorkloadModel.fit(lens, shared[0])


def step(blocks: nn.ModuleList, balancer: Balancer, plan: RoutingPlan, x_TD: Tensor) -> None:
    attend = balancer.attend(plan)
    y_TD = balancer.route(x_TD, plan)
    for block in blocks:
        y_TD = block(y_TD, attend)
    balancer.restore(y_TD, plan).square().sum().backward()


def attention_times(attend: BoundAttention, tokens: int) -> tuple[float, float]:
    """CPU seconds of one attention layer, and of its kernels alone."""
    qkv = torch.randn(3, tokens, HEADS, SIZE, requires_grad=True)
    packs = [(attend.whole, HEADS)]
    if attend.routes is not None:
        packs.append((attend.routes.packing, HEADS // attend.routes.n_blocks))
    packed = [(torch.randn(3, int(p.len_N.sum()), heads, SIZE, requires_grad=True), p) for p, heads in packs]
    layer, kernels = [], []
    for _ in range(REPEATS):
        begin = time.thread_time()
        attend(*qkv).sum().backward()
        layer.append(time.thread_time() - begin)
        begin = time.thread_time()
        for x, packing in packed:
            attend.kernel(x[0], x[1], x[2], packing).sum().backward()
        kernels.append(time.thread_time() - begin)
    return min(layer), min(kernels)


def bench(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None
    blocks = nn.ModuleList(Block() for _ in range(LAYERS))
    cost = measured_cost(blocks)
    x_TD = torch.randn(sum(lengths(rank)), WIDTH, requires_grad=True)
    for layout in [*STATIC[ranks], "elastic"]:
        balancer = Balancer(group, heads=HEADS, cost=cost, device="cpu", layout=layout)
        plan = balancer.plan(lengths(rank))
        busy, wall = [], []
        for _ in range(REPEATS):
            dist.barrier(group)
            cpu, begin = time.thread_time(), time.perf_counter()
            step(blocks, balancer, plan, x_TD)
            busy.append(time.thread_time() - cpu)
            wall.append(time.perf_counter() - begin)
        with SentBytes(rank) as sent:
            step(blocks, balancer, plan, x_TD)
        layer, kernels = attention_times(balancer.attend(plan), int(plan.tokens_R()[rank]))
        mine = (statistics.median(busy), statistics.median(wall), sent.total, layer, kernels)
        rows: list[Any] = [None] * ranks
        dist.all_gather_object(rows, mine, group)
        if rank == 0:
            print_row(ranks, layout, plan, cost, np.array(rows))
    dist.destroy_process_group()


def print_row(ranks: int, layout: str, plan: RoutingPlan, cost: WorkloadModel, rows_R5: np.ndarray) -> None:
    busy, wall, sent, layer, kernels = rows_R5.T
    engine = LAYERS * (layer - kernels).sum() / busy.sum()
    print(
        f"{ranks:5} {layout:>10} {plan.max_over_mean(cost):9.3f} {busy.max() / busy.mean():9.3f} "
        f"{busy.max() * 1e3:8.0f} {wall.max() * 1e3:8.0f} {sent.sum() / 1e6:8.2f} {engine:8.1%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", choices=sorted(STATIC), default=sorted(STATIC))
    ranks = parser.parse_args().ranks
    print("ranks     layout  modelled  busy max busy max  wall max     sent   engine")
    print("                  max/mean     /mean       ms        ms  MB/step  of busy")
    for n in ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(bench, (n, f"{folder}/store"), nprocs=n, start_method="spawn")


if __name__ == "__main__":
    main()
