"""report.html: one file that opens offline, and the pictures beside it."""

import base64
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from knapformer_cli.profile.animation import MOST_RANKS, routing_gif
from knapformer_cli.profile.charts import mix_drawing, steps_drawing, work_drawing
from knapformer_cli.profile.charts_cluster import memory_drawing, seconds_drawing, traffic_drawing
from knapformer_cli.profile.charts_run import measured_drawing
from knapformer_cli.profile.figures import COLUMNS, Results, duration, inputs, seconds_words, table_rows
from knapformer_cli.profile.theme import DARK, LIGHT, Drawing, Picture, render


def write_report(results: Results, folder: Path, done: Callable[[], None]) -> None:
    """Write the pictures (PNG), routing.gif and report.html; `done` is called after each picture."""
    pictures = []
    for drawing in drawings(results):
        picture = render(drawing)
        (folder / f"{picture.name}.png").write_bytes(picture.png)
        pictures.append(picture)
        done()
    gifs = [routing_gif(results, palette) for palette in (LIGHT, DARK)]
    (folder / "routing.gif").write_bytes(gifs[0])
    (folder / "report.html").write_text(page(results, pictures, gifs))


def drawings(results: Results) -> Iterator[Drawing]:
    """Every picture of the report, in order."""
    yield work_drawing(results)
    if results.measured_score is not None:
        yield measured_drawing(results, results.measured_score)
    yield seconds_drawing(results)
    yield steps_drawing(results)
    yield mix_drawing(results)
    yield traffic_drawing(results)
    yield memory_drawing(results)


def page(results: Results, pictures: list[Picture], gifs: list[bytes]) -> str:
    """The whole page, styles, pictures and animation included."""
    loader = PackageLoader("knapformer_cli.profile", ".")
    template = Environment(loader=loader, autoescape=True, undefined=StrictUndefined).get_template(
        "report.html.j2"
    )
    mix, config = results.scene.mix, results.question.config
    verdict, because, reason = results.sentence().partition(", because")
    steps = f"{len(mix.batches)} step{'s' if len(mix.batches) > 1 else ''}"
    return template.render(
        title=f"KnapFormer profile: {mix.origin}",
        subtitle=f"{mix.origin}, {mix.ranks} × {config.cluster.name}, {steps}",
        verdict=verdict,
        reason=because + reason,
        key=key_figures(results),
        steps=steps,
        meanings=meanings(),
        columns=COLUMNS,
        rows=table_rows(results),
        best=results.best.layout,
        refused=results.refused,
        pictures=pictures,
        routing=routing_words(results),
        gifs=[base64.b64encode(gif).decode() for gif in gifs],
        measured=measured_rows(results),
        inputs=input_rows(results),
        light=LIGHT,
        dark=DARK,
    )


def key_figures(results: Results) -> list[tuple[str, str]]:
    """The four numbers that matter, with their words."""
    best, none = results.best, results.none
    return [
        (f"{none.seconds / best.seconds:.2f} ×", f"as fast with {best.layout}, modelled"),
        (f"{seconds_words(none.seconds)} → {seconds_words(best.seconds)} s", "a step, modelled"),
        (f"{none.work_N.mean():#.3g} → {best.work_N.mean():.4g}", "busiest rank over the mean"),
        (f"{results.ideal / best.seconds:.1%}", "of the ideal, modelled"),
    ]


def measured_rows(results: Results) -> list[tuple[str, str, str]]:
    """Name, measured and modelled, of what a run logged; nothing where no run was asked about."""
    measured, score = results.question.measured, results.measured_score
    if measured is None or score is None:
        return []
    busy_NR = measured.busy_NR
    busy = "" if busy_NR is None else f"{(busy_NR.max(1) / busy_NR.mean(1)).mean():.3f}"
    seconds = [duration(float(x_N.mean())) for x_N in (measured.step_N, measured.route_N, measured.plan_N)]
    return [
        ("step", seconds[0], duration(score.seconds)),
        ("busiest rank over the mean", busy, f"{score.work_N.mean():.3f}"),
        ("routing", seconds[1], duration(float(score.parts_N["routing"].mean()))),
        ("gathering lengths and planning, ahead", seconds[2], f"{duration(float(score.plan_N.mean()))} here"),
        ("waiting for data and plan", duration(float(measured.data_N.mean())), ""),
    ]


def meanings() -> str:
    """What the columns mean, for those who cannot hover."""
    named = {
        name: words
        for name, words in COLUMNS.items()
        if name in ("sent", "moved", "across nodes", "of ideal")
    }
    return " ".join(f"{name[0].upper()}{name[1:]}: {words}." for name, words in named.items())


def routing_words(results: Results) -> str:
    """What the animation shows."""
    mix = results.scene.mix
    some = f" The first {MOST_RANKS} of {mix.ranks} ranks are drawn." if mix.ranks > MOST_RANKS else ""
    return (
        f"Step {results.typical_step}: every block of work leaves the rank that read it and lands where "
        f"{results.shown} computes it; the dashed line is the mean.{some}"
    )


def input_rows(results: Results) -> Iterator[tuple[str, str]]:
    """The inputs of report.json in words, with the seed and what was tuned."""
    values = inputs(results)
    cluster, model = values["cluster"], values["model"]
    count = model["parameters"]
    parameters = f"{count / 1e9:.3g} B parameters" if count >= 1e9 else f"{count / 1e6:.3g} M parameters"
    yield "lengths", values["lengths"]
    yield "ranks", f"{values['ranks']} in nodes of {cluster['node']}, domains of {values['domain']}"
    yield "tokens a step", f"{values['tokens_per_step']:,.0f} (mean)"
    yield "seed", str(results.question.config.training.seed)
    yield (
        "cluster",
        f"{cluster['name']}: of each device {cluster['peak_flops'] / 1e12:,.4g} TFLOP/s and "
        f"{cluster['memory'] / 2**30:,.4g} GiB, {cluster['bandwidth'] / 1e9:,.4g} GB/s inside a node and "
        f"{cluster['bandwidth_across'] / 1e9:,.4g} GB/s between nodes",
    )
    yield (
        "model",
        f"{parameters}, {model['blocks']} blocks of width {model['width']}, "
        f"{model['heads']} heads" + (", activations recomputed" if model["recompute"] else ""),
    )
    yield "cap of tokens a rank", _words(values["max_tokens_per_rank"])
    yield "planned with", f"{results.question.cost}: {_coefficients(values['workload'])}"
    yield "timed with", _coefficients(values["workload_seconds"]) + " (seconds)"
    if results.tuned:
        yield "searched", f"{results.tuned[1]} static specs; {results.tuned[0]} is the best that was found"
    for note in values["notes"]:
        yield "chosen", note


def _words(value: Any) -> str:
    return "none" if value is None else f"{value:,}"


def _coefficients(workload: dict[str, Any]) -> str:
    linear, quadratic = workload["linear"], workload["quadratic"]
    return f"{linear:.4g} L + {quadratic:.4g} L² of a sequence of L tokens"
