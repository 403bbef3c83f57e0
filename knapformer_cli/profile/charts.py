"""Pictures of the mix and of its work: per rank, over steps, by source.

N steps, R ranks, B blocks, K columns.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from knapformer_cli.profile.blocks import FEWEST, MOST_RANKS, Blocks, rank_blocks
from knapformer_cli.profile.figures import Results
from knapformer_cli.profile.score import Score
from knapformer_cli.profile.theme import LIGHT, Drawing, Sheet, source_colours


def work_drawing(results: Results) -> Drawing:
    """Every sequence a block on the rank that computes it, before and after."""
    scene, batch, step = results.scene, results.typical_batch, results.typical_step
    panels = [
        (when, title, rank_blocks(plans, batch, scene.cost, scene.mix.sources))
        for when, title, plans in (
            ("before", "as read", results.home_plans),
            ("after", results.shown, results.shown_plans),
        )
    ]
    names = source_colours(results.scene.mix.sources)

    def paint(sheet: Sheet) -> None:
        columns = 5 if sheet.wide else 2
        rows = -(-(len(names) + 1) // columns)
        hatched = "" if panels[1][2].grouped else "hatched: split"
        sheet.legend(names, columns, hatched)
        free = sheet.height - 19 * rows - 2 * 52 - 8
        share = [max(blocks.most, 1.0) * 1.08 for _, _, blocks in panels]
        top = 19 * rows + 8.0
        for number, (when, title, blocks) in enumerate(panels):
            height = free * share[number] / sum(share)
            bottom = sheet.height - top - 22 - height
            axes = sheet.axes(44, bottom, 4, top + 22)
            _stacks(axes, blocks, scene.mix.sources, names, when, scene.cluster.node)
            axes.set_ylim(0, share[number])
            axes.set_title(title)
            top += height + 52
            if number:
                words = "ranks, sorted by work" if blocks.grouped else "rank, in nodes"
                axes.set_xlabel(words)
            axes.set_ylabel("work / mean")

    grouped = scene.mix.ranks > MOST_RANKS
    return Drawing(
        "work",
        "Work of each rank, before and after",
        f"Step {step}, the one of median imbalance. "
        + (
            "Ranks are sorted by work and drawn in groups, the colours are sources. "
            if grouped
            else "Every block is a sequence, or the part of a split one, coloured by source. "
        )
        + "The height is modelled work over that of the mean rank, on one scale; triangles mark the slowest.",
        paint,
        (540, 640),
        {
            group: blocks.words_of(split)
            for when, _, blocks in panels
            if not blocks.grouped
            for split, group in ((False, when), (True, f"{when}-split"))
        },
    )


def _stacks(
    axes: Axes, blocks: Blocks, sources: list[str], names: dict[str, str], when: str, node: int
) -> None:
    """One collection, in the order of blocks, so that each can have its words."""
    gap = 0.0 if blocks.grouped else 0.45
    left_B = blocks.column_B + gap * (blocks.column_B // node)
    right_B, top_B = left_B + (1.0 if blocks.grouped else 0.86), blocks.bottom_B + blocks.height_B
    corners_B42 = np.stack(
        [
            np.stack([left_B, blocks.bottom_B], 1),
            np.stack([left_B, top_B], 1),
            np.stack([right_B, top_B], 1),
            np.stack([right_B, blocks.bottom_B], 1),
        ],
        1,
    )
    face_B = np.array([names[sources[source]] for source in blocks.source_B])
    thin = len(face_B) > 600
    for split in (False, True):
        here = np.flatnonzero(blocks.split_B == split)
        axes.add_collection(
            PolyCollection(
                list(corners_B42[here]),
                facecolors=face_B[here],
                edgecolors=LIGHT["page"],
                linewidths=0.0 if blocks.grouped else 0.35 if thin else 0.8,
                hatch="////" if split else None,
                clip_on=False,
                gid=f"{when}-split" if split else when,
            )
        )
    end = blocks.columns + gap * ((blocks.columns - 1) // node)
    axes.set_xlim(-0.2, max(end, FEWEST))  # a few ranks are no walls
    axes.axhline(1.0, color=LIGHT["ink"], linewidth=1.0, linestyle=(0, (4, 3)))
    _mark_slowest(axes, blocks, blocks.slowest + gap * (blocks.slowest // node) + 0.43)
    if blocks.grouped:
        axes.set_xticks([])
    else:
        ranks = np.arange(0, blocks.columns, max(1, min(node, blocks.columns // 4 or 1)))
        axes.set_xticks(ranks + gap * (ranks // node) + 0.43, [str(rank) for rank in ranks])
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))


def _mark_slowest(axes: Axes, blocks: Blocks, place: float) -> None:
    most = f"{blocks.most:.3f}" if blocks.most < 1.1 else f"{blocks.most:.3g}"
    words = f"rank {blocks.rank}: {most} × the mean"
    axes.set_title(words, loc="right", color=LIGHT["alarm"], fontsize=11, fontweight="normal")
    axes.plot([place], [blocks.most], marker="v", markersize=6, color=LIGHT["alarm"], clip_on=False)


def steps_drawing(results: Results) -> Drawing:
    """How far the busiest rank is above the mean, in every step and layout."""

    def paint(sheet: Sheet) -> None:
        axes = sheet.axes(52, 40, 110 if sheet.wide else 100, 12)
        number_N = np.array(results.scene.mix.steps)
        lines = {score.layout: 100 * np.maximum(score.work_N - 1, 1e-4) for score in results.scores}
        for score in sorted(results.scores, key=lambda score: layout_look(score, results)[1]):
            colour, width = layout_look(score, results)
            axes.plot(
                number_N,
                lines[score.layout],
                color=colour,
                linewidth=width,
                marker="o" if len(number_N) < 4 else "",
                markersize=4,
                clip_on=False,
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(10, numticks=6))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}%"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.margins(x=0.01)
        axes.set_xlabel("step")
        ends = {layout: float(line_N[-1]) for layout, line_N in lines.items()}
        _end_labels(axes, sheet, ends, {s.layout: layout_look(s, results)[0] for s in results.scores})

    return Drawing(
        "steps",
        "Busiest rank above the mean, step by step",
        "Modelled work of the busiest rank, per cent above the mean rank; logarithmic, from 0.01% upwards.",
        paint,
        (300, 300),
        {},
    )


def layout_look(score: Score, results: Results) -> tuple[str, float]:
    """Colour and width of a layout's line: what matters is the best one and the reading order."""
    if score.layout == results.best.layout:
        return LIGHT["accent"], 2.4
    if score.layout == "none":
        return LIGHT["alarm"], 1.8
    return LIGHT["muted"], 1.0


def _end_labels(axes: Axes, sheet: Sheet, ends: dict[str, float], looks: dict[str, str]) -> None:
    """Names at the right ends of lines, pushed apart where they would overlap."""
    low, high = np.log10(axes.get_ylim())
    tall = sheet.height - 52
    order = sorted(ends, key=lambda layout: ends[layout])
    words = [broken(layout) for layout in order]
    half = [7.0 + 7.0 * text.count("\n") for text in words]
    place = [(np.log10(ends[layout]) - low) / (high - low) * tall for layout in order]
    for i in range(1, len(place)):
        place[i] = max(place[i], place[i - 1] + half[i - 1] + half[i])
    place[-1] = min(place[-1], tall)
    for i in range(len(place) - 2, -1, -1):
        place[i] = min(place[i], place[i + 1] - half[i] - half[i + 1])
    for layout, text, height in zip(order, words, place, strict=True):
        axes.annotate(
            text,
            (1.0, height / tall),
            xycoords="axes fraction",
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            color=looks[layout],
            fontsize=11,
            linespacing=1.1,
            annotation_clip=False,
        )


def broken(layout: str) -> str:
    """A long name over two lines."""
    if len(layout) < 13:
        return layout
    places = [place for place, letter in enumerate(layout) if letter in "+ "]
    middle = min(places, key=lambda place: abs(place - len(layout) / 2), default=len(layout))
    return f"{layout[: middle + 1].rstrip()}\n{layout[middle + 1 :]}"


def mix_drawing(results: Results) -> Drawing:
    """Lengths by source, and how much of the tokens and of the work each source is."""
    scene, names = results.scene, source_colours(results.scene.mix.sources)
    len_S = np.concatenate([batch.len_S for batch in scene.mix.batches])
    source_S = np.concatenate([batch.source_S for batch in scene.mix.batches])
    steps = len(scene.mix.batches)
    by_name = {name: len_S[source_S == scene.mix.sources.index(name)] for name in names}

    def paint(sheet: Sheet) -> None:
        columns = 5 if sheet.wide else 2
        room = 19 * -(-len(names) // columns) + 14.0
        sheet.legend(names, columns)
        if sheet.wide:
            left = sheet.axes(46, 44, 500, room + 20)
            right = sheet.axes(606, 44, 20, room + 20)
        else:
            left = sheet.axes(46, sheet.height - room - 180, 6, room + 20)
            right = sheet.axes(80, 30, 18, room + 250)
        _lengths(left, by_name, names, steps)
        _shares(right, by_name, names, results)

    return Drawing(
        "mix",
        "Lengths, tokens and work by source",
        "First, sequences of a step by their length (logarithmic). Then, what share of the sequences, of the "
        "tokens and of the modelled work each source is: attention costs the square of the length.",
        paint,
        (330, 19.0 * -(-len(names) // 2) + 14 + 400),
        {},
    )


def _lengths(axes: Axes, by_name: dict[str, np.ndarray], names: dict[str, str], steps: int) -> None:
    every = np.concatenate(list(by_name.values()))
    low, high = every.min(), max(every.max(), every.min() + 1)
    edges = np.geomspace(low * 0.97, high * 1.03, 41)
    base = np.zeros(40)
    for name, lens in by_name.items():
        count = np.histogram(lens, edges)[0] / steps
        axes.stairs(base + count, edges, baseline=base, fill=True, color=names[name], clip_on=False)
        base = base + count
    axes.set_ylim(0, 1.04 * base.max())
    axes.set_xscale("log")
    decades = [10.0**d for d in range(12) if edges[0] <= 10.0**d <= edges[-1]]
    ticks = decades if len(decades) > 1 else np.geomspace(low, high, 3)
    axes.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", which="minor", length=2)
    axes.yaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("tokens of a sequence")
    axes.set_title("sequences a step")


def _shares(axes: Axes, by_name: dict[str, np.ndarray], names: dict[str, str], results: Results) -> None:
    cost = results.scene.cost
    rows: dict[str, Sequence[float]] = {
        "work": [float(cost.work(lens).sum()) for lens in by_name.values()],
        "tokens": [float(lens.sum()) for lens in by_name.values()],
        "sequences": [float(len(lens)) for lens in by_name.values()],
    }
    for row, values in enumerate(rows.values()):
        start, total = 0.0, sum(values)
        for name, value in zip(by_name, values, strict=True):
            share = 100 * value / total
            axes.barh(row, share, 0.62, start, color=names[name], edgecolor=LIGHT["page"], linewidth=0.8)
            start += share
    axes.set_yticks(range(3), list(rows))
    axes.tick_params(axis="y", length=0, labelcolor=LIGHT["ink"])
    axes.set_xlim(0, 100)
    axes.set_xticks([0, 25, 50, 75, 100], ["0", "25", "50", "75", "100%"])
    axes.spines["left"].set_visible(False)
    axes.set_title("share of a step")
