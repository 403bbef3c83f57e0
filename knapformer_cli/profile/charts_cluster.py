"""Pictures of what the cluster does: traffic, memory, seconds by part.

N cells, R ranks, K columns.
"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from matplotlib.ticker import MaxNLocator

from knapformer import RoutingPlan
from knapformer_cli.profile.blocks import FEWEST
from knapformer_cli.profile.charts import broken, layout_look
from knapformer_cli.profile.figures import Results, seconds_words
from knapformer_cli.profile.score import PARTS
from knapformer_cli.profile.theme import LIGHT, Drawing, Sheet

LEVELS = 5
MOST_CELLS = 64  # ranks, or groups of neighbours, on a side of a heat map


def traffic_drawing(results: Results) -> Drawing:
    """Who sends how many tokens to whom, at routing and in an attention exchange."""
    scene, plans = results.scene, results.shown_plans
    group = -(-scene.mix.ranks // MOST_CELLS)
    maps = {
        "moved at routing": sum(moved_KK(plan, group) for plan in plans),
        "sent in one attention exchange": sum(attention_KK(plan, group) for plan in plans),
    }

    def paint(sheet: Sheet) -> None:
        side = 380.0 if sheet.wide else sheet.width - 50
        for number, (title, table_KK) in enumerate(maps.items()):
            left = 44 + number * 490 if sheet.wide else 44
            top = 24.0 if sheet.wide else 24.0 + number * (side + 100)
            axes = sheet.axes(left, sheet.height - top - side, sheet.width - left - side, top)
            _heat(axes, np.asarray(table_KK), scene.cluster.node / group)
            axes.set_title(title)
            axes.set_ylabel("from rank")
            axes.set_xlabel("to rank")
            ticks = axes.get_xticks()
            axes.set_xticks(ticks, [f"{tick * group:.0f}" for tick in ticks])
            axes.set_yticks(ticks, [f"{tick * group:.0f}" for tick in ticks])
            _levels(axes, np.asarray(table_KK))

    return Drawing(
        "traffic",
        "Tokens between ranks",
        f"Step {results.typical_step} with {results.shown}. First, tokens that leave the rank that read "
        "them; then, those that a rank sends to each peer in one attention all-to-all. Lines part nodes."
        + (f" A cell is {group} neighbouring ranks." if group > 1 else ""),
        paint,
        (490, 800),
        {},
    )


def moved_KK(plan: RoutingPlan, group: int) -> np.ndarray:
    """[from, to] tokens that travel between groups of ranks at routing."""
    away_C = plan.home_C != plan.host_C
    columns = -(-plan.n_ranks // group)
    table_KK = np.zeros((columns, columns))
    np.add.at(table_KK, (plan.home_C // group, plan.host_C // group), plan.len_C * away_C)
    return table_KK


def attention_KK(plan: RoutingPlan, group: int) -> np.ndarray:
    """[from, to] tokens that travel between groups of ranks in one exchange: 1/degree of a chunk a peer."""
    columns = -(-plan.n_ranks // group)
    table_KK = np.zeros((columns, columns))
    split = np.flatnonzero(plan.degree_C() > 1)
    first, degree = split[plan.first_C()[split]], plan.degree_C()
    for size in np.unique(degree[first]):
        # The chunks of a sequence are neighbours, so those of one degree make a table.
        chunk_SG = first[degree[first] == size][:, None] + np.arange(size)
        host_SG, rows_SG = plan.host_C[chunk_SG], plan.len_C[chunk_SG] / size
        for peer in range(1, size):
            other_SG = np.roll(host_SG, -peer, axis=1)
            np.add.at(table_KK, (host_SG // group, other_SG // group), rows_SG)
    return table_KK


def level_edges(table_KK: np.ndarray) -> np.ndarray:
    """Lower ends of the levels of a heat map, each twice the one before."""
    return table_KK.max() / 2.0 ** np.arange(LEVELS, 0, -1)


def _heat(axes: Axes, table_KK: np.ndarray, node: float) -> None:
    """Cells of one level are one path, so that a large map stays a small file."""
    count = len(table_KK)
    axes.set_xlim(0, count)
    axes.set_ylim(count, 0)
    axes.set_aspect("equal")
    if table_KK.max() > 0:
        level_KK = np.digitize(table_KK, level_edges(table_KK)) - 1
        level_KK = np.where(table_KK > 0, np.maximum(level_KK, 0), -1)
        for level in range(LEVELS):
            row_N, column_N = np.nonzero(level_KK == level)
            if len(row_N):
                x, y = column_N[:, None], row_N[:, None]
                corners = np.stack(
                    [np.hstack([x, x + 1, x + 1, x, x]), np.hstack([y, y, y + 1, y + 1, y])], 2
                )
                codes = np.tile([Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY], len(row_N))
                path = Path(corners.reshape(-1, 2), codes)
                axes.add_patch(PathPatch(path, facecolor=LIGHT[f"q{level}"], linewidth=0))
    else:
        axes.text(0.5, 0.5, "no tokens", transform=axes.transAxes, ha="center", color=LIGHT["muted"])
    for border in np.arange(node, count, node) if node >= 1 else ():
        axes.axhline(border, color=LIGHT["muted"], linewidth=0.5)
        axes.axvline(border, color=LIGHT["muted"], linewidth=0.5)
    for spine in axes.spines.values():
        spine.set(visible=True, color=LIGHT["line"])
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ticks = [tick for tick in axes.get_xticks() if 0 <= tick < count]
    axes.set_xticks(ticks)


def _levels(axes: Axes, table_KK: np.ndarray) -> None:
    """The legend of a heat map, under it."""
    if table_KK.max() <= 0:
        return
    for level, edge in enumerate(level_edges(table_KK)):
        x = level / LEVELS
        axes.annotate(
            f"≥ {short(edge)}" if level else f"< {short(2 * edge)}",
            (x, 0),
            xycoords="axes fraction",
            xytext=(16, -46),
            textcoords="offset points",
            fontsize=11,
            color=LIGHT["muted"],
            va="center",
            annotation_clip=False,
        )
        axes.annotate(
            "■",
            (x, 0),
            xycoords="axes fraction",
            xytext=(0, -46),
            textcoords="offset points",
            fontsize=15,
            color=LIGHT[f"q{level}"],
            va="center",
            annotation_clip=False,
        )


def short(number: float) -> str:
    """Three digits at most, thousands as k."""
    unit, scale = ("M", 1e6) if number >= 999_500 else ("k", 1e3) if number >= 999.5 else ("", 1.0)
    digits = 1 if number / scale < 9.95 and unit else 0
    return f"{number / scale:.{digits}f}{unit}"


def memory_drawing(results: Results) -> Drawing:
    """The fullest moment of every rank against what a device has."""
    scene, best, none = results.scene, results.best, results.none
    cap, state = scene.cluster.memory / 2**30, _state_gib(results)
    best_K, none_K = _columns(best.memory_R), _columns(none.memory_R)

    def paint(sheet: Sheet) -> None:
        axes = sheet.axes(46, 42, 8, 34 if sheet.wide else 72)
        x_K = np.arange(len(best_K)) + 0.5
        axes.bar(x_K, best_K, 0.8, color=LIGHT["s2"], linewidth=0)
        axes.bar(x_K, np.minimum(best_K, state), 0.8, color=LIGHT["s0"], linewidth=0)
        axes.plot(
            x_K, none_K, linestyle="", marker="_", markersize=7, markeredgewidth=2, color=LIGHT["alarm"]
        )
        axes.axhline(cap, color=LIGHT["ink"], linewidth=1.2, clip_on=False)
        top = max(cap, best_K.max(), none_K.max()) * 1.12
        axes.set_ylim(0, top)
        axes.set_xlim(0, max(len(best_K), FEWEST))
        axes.text(0, cap, f" device memory, {cap:g} GiB", va="bottom", fontsize=11, color=LIGHT["ink"])
        axes.set_ylabel("GiB")
        if len(best_K) == scene.mix.ranks:
            ranks = np.arange(0, len(best_K), max(1, len(best_K) // 8))
            axes.set_xticks(ranks + 0.5, [str(rank) for rank in ranks])
            axes.set_xlabel("rank")
        else:
            axes.set_xticks([])
            axes.set_xlabel("ranks, fullest first")
        axes.yaxis.set_major_locator(MaxNLocator(4))
        names = {
            "weights, gradients, optimizer": LIGHT["s0"],
            f"activations, {best.layout}": LIGHT["s2"],
            "total, none": LIGHT["alarm"],
        }
        sheet.legend(names, 3 if sheet.wide else 1)

    return Drawing(
        "memory",
        "Memory of each rank",
        "Modelled; the most that a rank holds at once in any of the steps, against the memory of the device.",
        paint,
        (260, 300),
        {},
    )


def _state_gib(results: Results) -> float:
    """Memory of a rank without any token."""
    scene, none = results.scene, results.none
    return float((none.memory_R.max() - none.peak_N.max() * scene.shape.token_bytes) / 2**30)


def _columns(bytes_R: np.ndarray) -> np.ndarray:
    """GiB by rank; of many ranks the fullest of each group, sorted."""
    gib_R = bytes_R / 2**30
    if len(gib_R) <= MOST_CELLS:
        return gib_R
    groups = np.array_split(np.sort(gib_R)[::-1], MOST_CELLS)
    return np.array([group.max() for group in groups])


def seconds_drawing(results: Results) -> Drawing:
    """Where the modelled seconds of each layout go."""
    scores, ideal = results.scores, results.ideal

    def paint(sheet: Sheet) -> None:
        columns = 6 if sheet.wide else 3
        room = 19.0 * -(-len(PARTS) // columns) + 26
        sheet.legend({part: LIGHT[part] for part in PARTS}, columns)
        axes = sheet.axes(104, 40, 70 if sheet.wide else 52, room)
        for row, score in enumerate(reversed(scores)):
            start = 0.0
            for part in PARTS:
                width = float(score.parts_N[part].mean())
                axes.barh(row, width, 0.66, start, color=LIGHT[part], linewidth=0)
                start += width
            weight = "bold" if score is results.best else "normal"
            axes.annotate(
                seconds_words(start),
                (start, row),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=11,
                weight=weight,
            )
        axes.axvline(ideal, color=LIGHT["ink"], linewidth=1.0, linestyle=(0, (4, 3)))
        axes.annotate(
            f"ideal {seconds_words(ideal)} s",
            (ideal, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=11,
            annotation_clip=False,
        )
        axes.set_yticks(range(len(scores)), [broken(score.layout) for score in reversed(scores)])
        for label, score in zip(axes.get_yticklabels(), reversed(scores), strict=True):
            label.set_color(layout_look(score, results)[0] if score is results.best else LIGHT["ink"])
            label.set_fontweight("bold" if score is results.best else "normal")
        axes.tick_params(axis="y", length=0)
        axes.spines["left"].set_visible(False)
        axes.set_ylim(-0.6, len(scores) - 0.4)
        axes.set_xlabel("modelled seconds of a step")

    return Drawing(
        "seconds",
        "Where the seconds go",
        "Modelled seconds of a step, mean over steps. Compute, exchange and routing are the mean rank's, "
        "waiting is what the slowest rank has beyond it; of exchange and gradients only what nothing hides. "
        "The dashed line is the ideal that no layout can beat: even, without exchange and routing.",
        paint,
        (110 + 30 * len(scores), 140 + 30 * len(scores)),
        {},
    )
