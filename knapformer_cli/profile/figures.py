"""The figures of a profile as plain values: report.json, and the rows of every table.

N steps.
"""

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

import numpy as np
from rich.table import Table

from knapformer import RoutingPlan
from knapformer_cli.profile.mix import Batch
from knapformer_cli.profile.recommend import best_of, fits, recommendation
from knapformer_cli.profile.score import TIMED, Scene, Score, settings_of
from knapformer_cli.profile.settings import Question


@dataclass(frozen=True, eq=False)
class Results:
    """What was found out about a question."""

    question: Question
    scores: list[Score]
    refused: dict[str, str]  # layouts that could not plan every step, and why
    tuned: tuple[str, int] | None  # the best static spec that was found, and how many were tried

    @property
    def scene(self) -> Scene:
        return self.question.scene

    @property
    def possible(self) -> list[Score]:
        """Those that can be trained with: `none` is compared with even where its steps cannot be planned."""
        return [score for score in self.scores if score.layout not in self.refused]

    @property
    def best(self) -> Score:
        return best_of(self.possible, self.scene)

    @property
    def none(self) -> Score:
        return next(score for score in self.scores if score.layout == "none")

    @property
    def shown(self) -> str:
        """The layout that pictures of one step show: the best that balances."""
        balanced = [score for score in self.possible if score.layout != "none"]
        return best_of(balanced or self.possible, self.scene).layout

    @cached_property
    def typical(self) -> int:
        """The place of the step whose imbalance without balancing is the median one."""
        return int(np.argsort(self.none.work_N, kind="stable")[len(self.none.work_N) // 2])

    @property
    def typical_step(self) -> int:
        return self.scene.mix.steps[self.typical]

    @property
    def typical_batch(self) -> Batch:
        return self.scene.mix.batches[self.typical]

    @cached_property
    def shown_plans(self) -> tuple[RoutingPlan, ...]:
        """Of the typical step, with the layout that is shown."""
        return self.scene.plan(self.shown, self.typical_batch)

    @property
    def home_plans(self) -> tuple[RoutingPlan, ...]:
        """Of the typical step, as read, whatever the cap."""
        return replace(self.scene, max_tokens=None).plan("none", self.typical_batch)

    @property
    def measured_score(self) -> Score | None:
        """That of the layout of the run whose lengths these are."""
        measured = self.question.measured
        return next((score for score in self.scores if measured and score.layout == measured.layout), None)

    @property
    def ideal(self) -> float:
        return self.scene.ideal_seconds()

    def sentence(self) -> str:
        return recommendation(self.possible, self.none, self.scene, self.ideal)


def layout_figures(score: Score, scene: Scene, ideal: float) -> dict[str, Any]:
    """The figures of one layout: means over steps, where nothing else is said."""
    plan_ms = 1e3 * score.plan_N
    flop, peak = scene.flop(), scene.cluster.peak_flops * scene.cluster.ranks
    return {
        "layout": score.layout,
        "work_max_over_mean": {"mean": float(score.work_N.mean()), "worst": float(score.work_N.max())},
        "tokens_max_over_mean": float(score.tokens_N.mean()),
        "attention_sent": float(score.sent_N.mean()),
        "moved": float(score.moved_N.mean()),
        "crossed_nodes": float(score.crossed_N.mean()),
        "plan_ms": {"median": float(np.median(plan_ms)), "p99": float(np.quantile(plan_ms, 0.99))},
        "step_seconds": score.seconds,
        "of_ideal": ideal / score.seconds,
        "hfu": flop / (score.seconds * peak),
        "peak_tokens": int(score.peak_N.max()),
    }


def report_json(results: Results) -> dict[str, Any]:
    """All of report.json."""
    scene, config, ideal = results.scene, results.question.config, results.ideal
    details = {
        score.layout: {
            "seconds_by_part": {part: float(part_N.mean()) for part, part_N in score.parts_N.items()},
            "memory_gib": float(score.memory_R.max() / 2**30),
            "fits_memory": fits(score, scene),
            "micro_steps": int(score.micro_N.max()),
            "work_max_over_mean_by_step": score.work_N.tolist(),
        }
        for score in results.scores
    }
    measured = results.question.measured
    return {
        "knapformer": version("knapformer"),
        "seed": config.training.seed,
        "inputs": inputs(results),
        "ideal_step_seconds": ideal,
        "best": "elastic" if results.best.layout == TIMED else results.best.layout,
        "train_with": settings_of(results.best.layout),
        "recommendation": results.sentence(),
        "layouts": [layout_figures(score, scene, ideal) for score in results.scores],
        "details": details,
        "refused": [{"layout": layout, "reason": reason} for layout, reason in results.refused.items()],
        "tuned": {"layout": results.tuned[0], "tried": results.tuned[1]} if results.tuned else None,
        "measured": measured.figures() if measured else None,
    }


def inputs(results: Results) -> dict[str, Any]:
    """What the figures were computed from."""
    scene, config = results.scene, results.question.config
    return {
        "lengths": scene.mix.origin,
        "sources": scene.mix.sources,
        "ranks": scene.mix.ranks,
        "steps": scene.mix.steps,
        "tokens_per_step": scene.mix.tokens(),
        "cluster": {"name": config.cluster.name, **asdict(scene.cluster)},
        "model": asdict(scene.shape),
        "cost": results.question.cost,
        "workload": asdict(scene.cost),
        "workload_seconds": asdict(scene.seconds or scene.cluster.workload(scene.shape)),
        "domain": scene.domain,
        "max_tokens_per_rank": scene.max_tokens,
        "notes": results.question.notes,
    }


COLUMNS = {
    "layout": "layout",
    "work max/mean": "work of the busiest rank over the mean, mean over steps",
    "worst": "the same in the worst step",
    "tokens max/mean": "tokens of the fullest rank over the mean",
    "sent": "share of all tokens that leave their rank in one attention exchange",
    "moved": "share of all tokens that leave the rank that read them",
    "across nodes": "share of all tokens that travel to another node",
    "plan ms": "planning, median over steps",
    "p99 ms": "planning, 99th percentile",
    "step s": "modelled seconds of a step",
    "of ideal": "ideal over modelled seconds; the ideal is even, without exchange and routing",
    "HFU": "modelled share of the devices' peak, recomputation included",
    "peak tokens": "most tokens on one rank",
}


def table_rows(results: Results) -> list[list[str]]:
    """Rows of COLUMNS, in words and numbers."""
    rows = []
    for score in results.scores:
        row = layout_figures(score, results.scene, results.ideal)
        work, plan = row["work_max_over_mean"], row["plan_ms"]
        rows.append(
            [
                score.layout,
                f"{work['mean']:.4f}",
                f"{work['worst']:.4f}",
                f"{row['tokens_max_over_mean']:.3f}",
                *(f"{row[share]:.3f}" for share in ("attention_sent", "moved", "crossed_nodes")),
                f"{plan['median']:.1f}",
                f"{plan['p99']:.1f}",
                f"{row['step_seconds']:.3f}",
                *(f"{row[share]:.3f}" for share in ("of_ideal", "hfu")),
                f"{row['peak_tokens']:,}",
            ]
        )
    return rows


def seconds_words(seconds: float) -> str:
    """Three digits that count."""
    return f"{seconds:#.3g}".rstrip(".")


def duration(seconds: float) -> str:
    """The same with its unit, of which there are two."""
    return f"{seconds_words(1e3 * seconds)} ms" if seconds < 0.1 else f"{seconds_words(seconds)} s"


def rich_table(results: Results) -> Table:
    """The comparison for a terminal, the best layout in bold."""
    table = Table(title=f"{results.scene.mix.origin}, {results.scene.mix.ranks} ranks", title_justify="left")
    for column in COLUMNS:
        table.add_column(
            column, justify="left" if column == "layout" else "right", no_wrap=column == "layout"
        )
    for row in table_rows(results):
        table.add_row(*row, style="bold" if row[0] == results.best.layout else "")
    return table
