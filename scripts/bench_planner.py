"""The planners on CPU: balance, tokens on the move and planning time, beside the paper's greedy.

Prints the tables of docs/planner.md. Nothing here communicates: seconds of a step are modelled, those of
planning are measured, as time of the one core that it takes. `--exact` adds the distance from the optimum on
small cases (OR-Tools CP-SAT, a test extra).
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from data.codes import PRESETS, repeated_lengths, synthetic_lengths
from knapformer import RoutingPlan, WorkloadModel, cluster, plan_routes
from knapformer.cluster import Cluster, ModelShape
from knapformer.layout import split_degrees

RANKS, DOMAIN, HEADS, WIDTH, GAMMA = 32, 8, 24, 3072, 0.49
COST = WorkloadModel.analytic(WIDTH, GAMMA)
NAMES = [name.removeprefix("paper_") for name in PRESETS]
# A clip of 10 or 15 s at 16 frames a second: 4 frames to a latent, after the first; patches of 16 pixels.
CLIPS = [(1 + seconds * 4) * patches for seconds in (10, 15) for patches in (45 * 80, 68 * 120)]
IDEAL_SECONDS, PUBLISHED_SECONDS = 2.76, 3.44  # joint on 32 H100, without communication and as published
H100, FLUX = Cluster(ranks=RANKS, node=DOMAIN), ModelShape(width=WIDTH, heads=HEADS)

Batch = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A workload and how it is planned; `judge` is the truth where the planner's cost is wrong on purpose."""

    batches: list[Batch]
    ranks: int = RANKS
    domain: int = DOMAIN
    cost: WorkloadModel = COST
    judge: WorkloadModel = COST
    max_tokens: int | None = None

    def plans(self, layout: str) -> Iterator[tuple[RoutingPlan, float]]:
        """The plan of every batch, and the least seconds of planning it three times."""
        for lens, homes in self.batches:
            times = []
            for _ in range(3):
                start = time.process_time()
                plan = plan_routes(
                    lens,
                    homes,
                    ranks=self.ranks,
                    layout=layout,
                    heads=HEADS,
                    cost=self.cost,
                    domain=self.domain,
                    max_tokens=self.max_tokens,
                )
                times.append(time.process_time() - start)
            yield plan, min(times)

    def row(self, name: str, layout: str) -> list[str]:
        """Mean and worst max/mean, shares sent, moved and across nodes, fullest rank, planning time."""
        plans, seconds = zip(*self.plans(layout), strict=True)
        balance = [plan.max_over_mean(self.judge) for plan in plans]
        milliseconds = 1e3 * np.array(seconds)
        shares = [
            np.mean([plan.attention_sent() for plan in plans]),
            np.mean([plan.moved() for plan in plans]),
            np.mean([plan.crossed(DOMAIN) for plan in plans]),
        ]
        return [
            name,
            layout,
            f"{np.mean(balance):.4f}",
            f"{max(balance):.4f}",
            *(f"{share:.3f}" for share in shares),
            f"{max(plan.peak_tokens() for plan in plans):,}",
            f"{np.median(milliseconds):.2f}",
            f"{np.quantile(milliseconds, 0.99):.2f}",
        ]


COLUMNS = [
    "workload",
    "layout",
    "max/mean",
    "worst",
    "sent",
    "moved",
    "across nodes",
    "peak tokens",
    "plan ms",
    "p99 ms",
]


def clip_batch(ranks: int, seed: int) -> Batch:
    """Clips of 10 and 15 s, 720p and 1080p, with 35 to 60 % of the 350,000 tokens a rank; else pictures."""
    generator = np.random.default_rng(seed)
    total = 350_000 * ranks
    in_clips = total * generator.uniform(0.35, 0.60)
    lens: list[int] = []
    while in_clips - sum(lens) > 80_000:
        fitting = [n for n in CLIPS if n <= in_clips - sum(lens) + 80_000]
        lens.append(int(generator.choice(fitting or CLIPS[:1])) + int(generator.integers(0, 393)))
    while sum(lens) < total:
        picture = generator.choice([256, 512, 1024, 2048]) ** 2 // 256 * generator.uniform(0.96, 1.04)
        lens.append(int(picture) + int(generator.integers(0, 393)))
    return np.array(lens), generator.integers(0, ranks, len(lens))


def repeated(preset: str, seed: int, times: int) -> Batch:
    """The workload of `times` clusters as one batch."""
    lens, homes, _ = repeated_lengths(preset, RANKS * times, seed)
    return lens, homes


def numbers(console: Console, seeds: int) -> None:
    table = Table(*COLUMNS, title=f"{RANKS} ranks in nodes of {DOMAIN}, {HEADS} heads, {seeds} seeds")
    for name in NAMES:
        case = Case([synthetic_lengths(f"paper_{name}", seed) for seed in range(seeds)])
        for layout in ("none", "g1n32", "g4n8", "g8n4", "elastic"):
            table.add_row(*case.row(name, layout), end_section=layout == "elastic")
    console.print(table)


def large(console: Console, seeds: int) -> None:
    table = Table(*COLUMNS, title="1,024 ranks: every workload 32 times")
    for name in NAMES:
        case = Case([repeated(f"paper_{name}", seed, 32) for seed in range(max(2, seeds // 10))], ranks=1024)
        for layout in ("g1n1024", "g8n128", "elastic"):
            table.add_row(*case.row(f"{name} x32", layout), end_section=layout == "elastic")
    console.print(table)


def sensitivity(console: Console, seeds: int) -> None:
    table = Table(*COLUMNS, title="Planned with gamma wrong by a quarter, judged with the right one")
    for factor in (0.75, 1.25):
        cost = WorkloadModel.analytic(WIDTH, GAMMA * factor)
        for name in NAMES:
            batches = [synthetic_lengths(f"paper_{name}", seed) for seed in range(seeds)]
            table.add_row(*Case(batches, cost=cost).row(f"{name}, gamma x{factor}", "elastic"))
    console.print(table)


def long_clips(console: Console, seeds: int) -> None:
    table = Table(
        *COLUMNS, title="Clips of 10 and 15 s, 720p and 1080p, among pictures; the domain is the job"
    )
    for ranks in (8, 16, 32):
        batches = [clip_batch(ranks, seed) for seed in range(seeds)]
        for cap in (None, 385_000):
            case = Case(batches, ranks=ranks, domain=ranks, max_tokens=cap)
            table.add_row(*case.row(f"{ranks} ranks{f', cap {cap:,}' if cap else ''}", "elastic"))
    console.print(table)


def step_seconds(console: Console, seeds: int) -> None:
    """Modelled (docs/cluster-model.md): planned with the cluster's own seconds, traffic included."""
    cost = H100.workload(FLUX)
    columns = ("workload", "layout", "modelled seconds", "of ideal", "above bound")
    table = Table(*columns, title=f"Modelled step of FLUX on {RANKS} H100 in nodes of {DOMAIN}")
    for name in NAMES:
        case = Case([synthetic_lengths(f"paper_{name}", s) for s in range(seeds)], cost=cost, judge=cost)
        ideal = np.mean([cluster.ideal_seconds(lens, FLUX, H100) for lens, _ in case.batches])
        layouts = ["none", *(f"g{g}n{RANKS // g}" for g in (1, 2, 4, 8)), best_mixed(case), "elastic"]
        for layout in layouts:
            plans = [plan for plan, _ in case.plans(layout)]
            seconds = np.mean([cluster.step_seconds([plan], FLUX, H100).total for plan in plans])
            gap = np.mean([plan.gap(cost, heads=HEADS, domain=DOMAIN) for plan in plans])
            table.add_row(name, layout, f"{seconds:.3f}", f"{ideal / seconds:.3f}", f"{gap:.4f}")
        table.add_section()
    console.print(table)
    console.print(
        f"Published for joint: {PUBLISHED_SECONDS} s, {IDEAL_SECONDS / PUBLISHED_SECONDS:.2f} of ideal."
    )


def best_mixed(case: Case) -> str:
    """Of all specs with bags of one or two sizes, that of least mean seconds on the first batches."""
    specs = []
    for small in (1, 2, 4):
        for large_ in (g for g in (2, 4, 8) if g > small):
            for bags in range(1, RANKS // large_):
                specs.append(f"g{small}n{(RANKS - large_ * bags) // small}+g{large_}n{bags}")
    few = replace(case, batches=case.batches[:4])
    return min(specs, key=lambda spec: sum(plan.seconds(case.judge) for plan, _ in few.plans(spec)))


def exact_seconds(
    lens: np.ndarray, *, ranks: int, heads: int, domain: int, cost: WorkloadModel, limit: float = 30.0
) -> tuple[float, float]:
    """With even shards: least seconds that CP-SAT finds in `limit` seconds, and proves to be possible."""
    from ortools.sat.python import cp_model

    model, degrees = cp_model.CpModel(), split_degrees(heads, ranks, domain)
    scale = 1e6 / float(cost.seconds(lens).max())
    latest = model.new_int_var(0, int(1e6 * len(lens)), "latest")
    loads: list[list[cp_model.LinearExprT]] = [[] for _ in range(ranks)]
    for s, length in enumerate(lens.tolist()):
        choices = []
        for degree in degrees:
            for first in range(0, ranks, domain):
                block = range(first, min(first + domain, ranks))
                if degree > len(block):
                    continue
                chosen = model.new_bool_var(f"{s} by {degree} at {first}")
                hosts = [model.new_bool_var(f"{s} by {degree} on {rank}") for rank in block]
                model.add(sum(hosts) == degree * chosen)
                units = round(scale * float(cost.seconds(length, degree)))
                for rank, host in zip(block, hosts, strict=True):
                    loads[rank].append(units * host)
                choices.append(chosen)
        model.add_exactly_one(choices)
    for load in loads:
        model.add(sum(load) <= latest)
    model.minimize(latest)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit
    solver.parameters.num_workers = 1
    solver.solve(model)
    return float(solver.objective_value) / scale, float(solver.best_objective_bound) / scale


def exact(console: Console, seeds: int) -> None:
    """Gaps to what the solver found, and to what it proved that no even shards beat."""
    table = Table(
        *("ranks", "sequences", "lengths", "elastic / found", "worst", "elastic / proven"),
        title="Against even shards at their optimum, on small cases",
    )
    for ranks, count, kind in SMALL_CASES:
        found, proven = [], []
        for seed in range(min(seeds, 3)):
            generator = np.random.default_rng(seed)
            lens = generator.integers(500, 30_000, count)
            if kind == "mixed":
                lens = generator.choice(MIXED, count) + generator.integers(0, 393, count)
            homes = generator.integers(0, ranks, count)
            plan = plan_routes(lens, homes, ranks=ranks, layout="elastic", heads=HEADS, cost=COST)
            best, bound = exact_seconds(lens, ranks=ranks, heads=HEADS, domain=DOMAIN, cost=COST, limit=5)
            found.append(plan.seconds(COST) / best)
            proven.append(plan.seconds(COST) / bound)
        figures = (f"{x:.4f}" for x in (np.mean(found), max(found), np.mean(proven)))
        table.add_row(str(ranks), str(count), kind, *figures)
    console.print(table)


MIXED = [300, 1220, 4290, 16_600, 25_800]  # tokens of pictures of 256 to 2,048 pixels, and of a clip
SMALL_CASES = [
    (4, 8, "uniform"),
    (4, 16, "uniform"),
    (8, 12, "uniform"),
    (8, 20, "uniform"),
    (8, 20, "mixed"),
]

PARTS: dict[str, Callable[[Console, int], None]] = {
    "numbers": numbers,
    "large": large,
    "sensitivity": sensitivity,
    "clips": long_clips,
    "seconds": step_seconds,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--seeds", type=int, default=20, help="batches of each workload")
    parser.add_argument("--exact", action="store_true", help="add the distance from the optimum, by CP-SAT")
    args = parser.parse_args()
    unknown = set(args.parts) - set(PARTS)
    if unknown:
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    console = Console(width=140)
    for name in args.parts or PARTS:
        PARTS[name](console, args.seeds)
    if args.exact:
        exact(console, args.seeds)


if __name__ == "__main__":
    main()
