"""Seconds a training step with and without the balancer, side by side on two gloo ranks of one thread each.

Rank 0 reads only clips, rank 1 only pictures. The same global batch runs with layout `none` and with the
planner's, in turns; printed are medians, their ratio, and the ideal ratio that the work model gives (fitted
here first): the work of the busiest rank without balancing over the mean.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from data.geometry import patchify
from data.samples import Sample
from knapformer import (
    WorkloadModel,
    bind_attention,
    choose_kernel,
    gather_lengths,
    make_domain_group,
    plan_routes,
)
from knapformer_cli.config import compose
from knapformer_cli.schema import LaunchConfig
from knapformer_cli.training.batch import GlobalBatch, describe, flow_loss, route_batch
from knapformer_cli.training.parallel import World, distributed_world, parallelize
from models.codec import PixelCodec
from models.denoiser import build_denoiser

# name: what rank 0 reads, what rank 1 reads; (samples, frames, height, width) in pixels
MIXES = {
    "8 clips | 8 pictures": ((8, 8, 16, 16), (8, 1, 16, 16)),
    "1 long clip | 24 pictures": ((1, 16, 32, 32), (24, 1, 16, 16)),
}
LENGTHS = (64, 128, 256, 512, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="preset of conf/model")
    parser.add_argument("--layout", default="elastic", help="layout held against none")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each layout that count")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(
            _rank, (folder, args.model, args.layout, args.rounds), nprocs=2, start_method="spawn"
        )


def _rank(rank: int, folder: str, model_name: str, layout: str, rounds: int) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    with distributed_world(LaunchConfig(device="cpu"), 1, store, rank, 2) as world:
        bench = Bench(world, model_name)
        cost = bench.fit_cost()
        columns = ("mix", "none s", f"{layout} s", "ratio", "ideal", "of ideal")
        table = Table(*columns, title=f"seconds a step, model {model_name}, 2 ranks")
        for name, mix in MIXES.items():
            seconds, ideal = bench.compare(mix[rank], ["none", layout], cost, rounds)
            ratio = seconds["none"] / seconds[layout]
            figures = [seconds["none"], seconds[layout], ratio, ideal]
            table.add_row(name, *(f"{x:.3f}" for x in figures), f"{ratio / ideal:.1%}")
        if rank == 0:
            print(f"work model fitted here: {cost.linear * 1e6:.2f} us L + {cost.quadratic * 1e9:.3f} ns L^2")
            Console(width=110).print(table)


class Bench:
    """The training step of the harness on made samples."""

    def __init__(self, world: World, model_name: str):
        self.world, self.config = world, compose([f"model={model_name}"])
        self.codec = PixelCodec(self.config.data.patch, self.config.data.patch_time)
        torch.manual_seed(0)
        model = build_denoiser(self.config.model, self.config.data.channels)
        self.model = parallelize(model, self.config.parallel, world)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.domain_group = make_domain_group(world.group, 2)
        self.kernel = choose_kernel("sdpa", world.device)

    def fit_cost(self) -> WorkloadModel:
        """The work model of this model on this machine, from whole steps over sequences of one length."""
        unit = WorkloadModel.analytic(width=self.config.model.width)
        seconds = []
        for length in LENGTHS:
            count = max(1, 2048 // length)
            samples = self.samples(count, 1, 2 * length // 8, 16)  # 8 patches a row
            step = self.step(samples, "none", unit)
            step()
            seconds.append(min(_timed(step) for _ in range(4)) / count)
        shared: list[list[float]] = [[]] * self.world.ranks
        dist.all_gather_object(shared, seconds, group=self.world.cpu_group)
        return WorkloadModel.fit(LENGTHS, np.mean(shared, axis=0))

    def samples(self, count: int, frames: int, height: int, width: int) -> list[Sample]:
        rng = np.random.default_rng(self.world.rank)
        made = []
        for number in range(count):
            pixels = rng.integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
            patch_VC, position_V3, grid = patchify(pixels, self.codec.patch, self.codec.patch_time)
            text_W = np.zeros(0, np.uint8)
            made.append(Sample(number + 1000 * self.world.rank, "", "", text_W, patch_VC, position_V3, grid))
        return made

    def step(self, samples: list[Sample], layout: str, cost: WorkloadModel) -> Callable[[], None]:
        """One optimizer step on the global batch, planning included, as a function of nothing."""
        w, heads = self.world, self.config.model.heads

        def run() -> None:
            batch = GlobalBatch.of(*gather_lengths(describe(samples), w.cpu_group))
            plan = plan_routes(
                batch.len_S, batch.home_S, ranks=w.ranks, layout=layout, heads=heads, cost=cost, domain=2
            )
            arrived = route_batch(samples, batch, plan, w, self.config.data.channels)
            attend = bind_attention(plan, self.domain_group, kernel=self.kernel, device=w.device)
            clean_VC = self.codec.encode(arrived.patch_VC)
            flow = self.config.training.flow
            error = flow_loss(self.model, arrived, attend, flow, clean_VC, seed=0, step=0)
            (error * (w.ranks / batch.visual_S.sum())).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

        return run

    def compare(
        self, mine: tuple[int, int, int, int], layouts: list[str], cost: WorkloadModel, rounds: int
    ) -> tuple[dict[str, float], float]:
        """Median seconds of a step by layout, taken in turns, and the ideal ratio of the unbalanced one."""
        samples = self.samples(*mine)
        steps = {layout: self.step(samples, layout, cost) for layout in layouts}
        times: dict[str, list[float]] = {layout: [] for layout in layouts}
        for number in range(rounds + 2):
            for layout, step in steps.items():
                dist.barrier()
                seconds = _timed(step)
                if number >= 2:
                    times[layout].append(seconds)
        batch = GlobalBatch.of(*gather_lengths(describe(samples), self.world.cpu_group))
        work_R = np.bincount(batch.home_S, cost.work(batch.len_S), minlength=self.world.ranks)
        return {layout: statistics.median(x) for layout, x in times.items()}, float(
            work_R.max() / work_R.mean()
        )


def _timed(step: Callable[[], None]) -> float:
    begin = time.perf_counter()
    step()
    dist.barrier()  # a step is as long as its slowest rank
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
