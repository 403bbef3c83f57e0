"""What a run measured, beside what is modelled of the same steps.

N steps, R ranks.
"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from knapformer import RoutingPlan
from knapformer_cli.profile.figures import Results
from knapformer_cli.profile.score import PARTS, Score
from knapformer_cli.profile.theme import LIGHT, Drawing, Sheet


def measured_drawing(results: Results, score: Score) -> Drawing:
    """What a run measured, beside what is modelled of the same steps."""
    measured = results.question.measured
    assert measured is not None
    number_N, step_N = measured.number_N, measured.step_N
    modelled_N = np.sum([score.parts_N[part] for part in PARTS], axis=0)
    busy_NR = measured.busy_NR

    def paint(sheet: Sheet) -> None:
        both = busy_NR is not None
        room = 26.0
        sheet.legend({"measured": LIGHT["accent"], "modelled": LIGHT["s5"]}, 2)
        if sheet.wide:
            left = sheet.axes(52, 42, 470 if both else 8, room + 22)
        else:
            left = sheet.axes(52, 42 + (260 if both else 0), 8, room + 22)
        left.plot(number_N, step_N, color=LIGHT["accent"], linewidth=1.8)
        left.plot(number_N, modelled_N, color=LIGHT["s5"], linewidth=1.8)
        left.set_ylim(0, max(step_N.max(), modelled_N.max()) * 1.1)
        left.set_title("seconds of a step")
        left.set_xlabel("step")
        left.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        if busy_NR is not None:
            right = sheet.axes(550, 42, 8, room + 22) if sheet.wide else sheet.axes(52, 42, 8, 300)
            _busy(right, busy_NR, results, score)

    return Drawing(
        "measured",
        "Measured beside modelled",
        f"The run's own steps {number_N[0]} to {number_N[-1]} with {measured.layout}: seconds of the slowest "
        "rank, and the cluster model's. Where ranks are CPUs also the processor seconds of each rank over "
        "the mean rank's, and modelled work; dots are means, bars span the steps.",
        paint,
        (290, 540 if busy_NR is not None else 290),
        {},
    )


def _busy(axes: Axes, busy_NR: np.ndarray, results: Results, score: Score) -> None:
    scene = results.scene
    plans: Sequence[tuple[RoutingPlan, ...]] = [
        scene.plan(score.layout, batch) for batch in scene.mix.batches
    ]
    work_NR = np.stack([sum(plan.work_R(scene.cost) for plan in step) for step in plans])
    for values_NR, colour, shift in ((busy_NR, LIGHT["accent"], -0.16), (work_NR, LIGHT["s5"], 0.16)):
        share_NR = values_NR / values_NR.mean(1, keepdims=True)
        x_R = np.arange(share_NR.shape[1]) + shift
        axes.vlines(x_R, share_NR.min(0), share_NR.max(0), color=colour, linewidth=1.5)
        axes.plot(x_R, share_NR.mean(0), "o", color=colour, markersize=5)
    axes.axhline(1.0, color=LIGHT["line"], linewidth=1.0, zorder=0)
    axes.set_title("busy / mean of ranks")
    axes.set_xlabel("rank")
    axes.set_xlim(-0.6, busy_NR.shape[1] - 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
