"""`knapformer profile`: plan many steps, compare layouts, write the report."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from knapformer_cli.profile.figures import Results, report_json, rich_table
from knapformer_cli.profile.score import TIMED, CannotPlan, Scene, Score, score_layout
from knapformer_cli.profile.settings import Question, read_question
from knapformer_cli.profile.tune import tune_static
from knapformer_cli.schema import ProfileConfig

MOST_TIMED = 64  # ranks; with traffic in its cost, elastic planning of thousands takes many seconds a step


def profile_command(overrides: Sequence[str]) -> None:
    """Print the table of layouts and write report.json, report.html, pictures and animation to run.dir."""
    question = read_question(overrides)
    folder = Path(question.config.run.dir)
    check_writable(folder)
    out = Console()
    if not out.is_terminal:
        out = Console(width=150)
    for note in [*question.notes, f"planned with {question.cost}"]:
        out.print(note, highlight=False)
    with progress_bar() as (bar, task):
        results = compare(question, bar, task)
        report = json.dumps(report_json(results), indent=2, allow_nan=False) + "\n"
        from knapformer_cli.profile.report import write_report  # matplotlib takes a second to import

        bar.update(task, description="drawing", total=7, completed=0)
        folder.mkdir(parents=True, exist_ok=True)
        write_report(results, folder, lambda: bar.advance(task))
        # Last and at once: whoever reads report.json finds the page and the pictures that belong to it.
        partial = folder / "report.json.partial"
        partial.write_text(report)
        partial.replace(folder / "report.json")
    out.print(rich_table(results))
    for layout, reason in results.refused.items():
        out.print(f"{layout} cannot plan every step: {reason}", highlight=False)
    out.print(results.sentence(), highlight=False)
    out.print(f"{folder}/report.html", highlight=False, soft_wrap=True)


def compare(question: Question, bar: Progress, task: TaskID) -> Results:
    """Score every layout, and search static specs where asked."""
    scene, profile = question.scene, question.config.profile
    ran = [question.measured.layout] if question.measured else []
    layouts = chosen_layouts(scene, profile, ran)
    steps = len(scene.mix.batches)
    bar.update(task, total=steps * len(layouts))
    scores: list[Score] = []
    refused: dict[str, str] = {}

    def score(layout: str) -> None:
        bar.update(task, description=f"planning {layout}")
        try:
            scores.append(score_layout(scene, layout, lambda: bar.advance(task)))
        except CannotPlan as error:
            refused[layout] = str(error)

    fixed = [layout for layout in layouts if not layout.startswith("elastic")]
    for layout in fixed:
        score(layout)
    tuned = None
    if profile.tune:
        tried = iter(range(10**9))
        tuned = tune_static(scene, lambda: bar.update(task, description=f"searching, {next(tried)} specs"))
        if tuned[0] not in layouts:
            score(tuned[0])
    for layout in layouts[len(fixed) :]:
        score(layout)
    if not scores:
        raise ValueError(f"no layout can plan this mix; {layouts[-1]}: {refused[layouts[-1]]}")
    if "none" in refused:  # what is compared with; it never becomes the best
        scores.insert(0, score_layout(replace(scene, max_tokens=None), "none"))
        refused["none"] += " (its figures here are without that cap)"
    return Results(question, scores, refused, tuned)


def chosen_layouts(scene: Scene, profile: ProfileConfig, ran: Sequence[str]) -> list[str]:
    """`none`, uniform bags, given ones, those of a run, and `elastic` last, each once."""
    uniform = scene.uniform_layouts() if profile.uniform else []
    given = [layout for layout in [*profile.layouts, *ran] if layout not in ("none", "elastic")]
    # A cost without traffic makes work even, not time: what knows the cluster may do better.
    timed = [TIMED] if not scene.cost.traffic and 1 < scene.mix.ranks <= MOST_TIMED else []
    return list(dict.fromkeys(["none", *uniform, *given, *timed, "elastic"]))


def check_writable(folder: Path) -> None:
    """ValueError where `folder` can neither be written nor made; nothing of the trial stays behind."""
    try:
        nearest = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise ValueError(f"run.dir {folder} cannot be written: {error.strerror}") from error


@contextmanager
def progress_bar() -> Iterator[tuple[Progress, TaskID]]:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar, bar.add_task("planning", total=None)
