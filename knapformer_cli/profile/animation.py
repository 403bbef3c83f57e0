"""One step's routing as a GIF: tokens leave the ranks that read them and land on their hosts.

C chunks.
"""

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageColor, ImageDraw, ImageFont

from knapformer_cli.profile.blocks import FEWEST, chunk_columns, stacked
from knapformer_cli.profile.figures import Results
from knapformer_cli.profile.theme import LIGHT, source_colours

WIDTH, HEIGHT, TOP, FOOT = 760, 400, 56, 14
MOVE = 26  # frames on the way
THIN = 4  # pixels; blocks below have no outline, which would be all of them
FRAME_MS, REST_MS = 60, 1400
MOST_RANKS = 64  # the first ones of a larger cluster


def routing_gif(results: Results, palette: dict[str, str]) -> bytes:
    """The typical step from reading order to the layout's plan, in the page colours of `palette`."""
    scene, batch, plans = results.scene, results.typical_batch, results.shown_plans
    seq_C, home_C, host_C, work_C, split_C = chunk_columns(plans, scene.cost)
    height_C = work_C * scene.mix.ranks / work_C.sum()
    source_C = batch.source_S[seq_C]
    ends = []
    for place_C in (home_C, host_C):
        order = np.lexsort((seq_C, -work_C, source_C, ~split_C, place_C))
        bottom_C = np.empty(len(order))
        bottom_C[order] = stacked(place_C[order], height_C[order])
        ends.append((place_C, bottom_C))
    shown = (home_C < MOST_RANKS) | (host_C < MOST_RANKS)
    named = source_colours(scene.mix.sources)
    role = {value: name for name, value in LIGHT.items()}
    fill_S = [palette[role[named[name]]] for name in scene.mix.sources]
    most = [np.bincount(place_C, height_C).max() for place_C in (home_C, host_C)]
    stage = Stage(min(scene.mix.ranks, MOST_RANKS), scene.cluster.node, max(most), palette)
    words = [f"as read: {most[0]:.2f} × the mean", "routing", f"{results.shown}: {most[1]:.3f} × the mean"]
    frames = []
    for number in range(MOVE + 1):
        share = number / MOVE
        # Ranks on the left set out first; ease in and out.
        own_C = np.clip(share * 1.35 - 0.35 * home_C / scene.mix.ranks, 0.0, 1.0)
        way_C = own_C * own_C * (3 - 2 * own_C)
        column_C, bottom_C = (a + (b - a) * way_C for a, b in zip(*ends, strict=True))
        say = words[0] if number == 0 else words[2] if number == MOVE else words[1]
        picked = np.flatnonzero(shown)
        fills = [fill_S[source] for source in source_C[picked]]
        frames.append(stage.draw(say, column_C[picked], bottom_C[picked], height_C[picked], fills))
    return _encoded(frames, palette, fill_S)


class Stage:
    """Columns of ranks, and the scale of their stacks."""

    def __init__(self, columns: int, node: int, most: float, palette: dict[str, str]):
        self.columns, self.node, self.palette = columns, node, palette
        self.unit = (HEIGHT - TOP - FOOT) / (most * 1.02)
        gaps = (columns - 1) // node
        self.step = (WIDTH - 16) / max(columns + 0.4 * gaps, FEWEST)
        fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
        self.font = ImageFont.truetype(str(fonts / "DejaVuSans.ttf"), 23)

    def draw(
        self,
        words: str,
        column_N: np.ndarray,
        bottom_N: np.ndarray,
        height_N: np.ndarray,
        fills: Sequence[str],
    ) -> Image.Image:
        image = Image.new("RGB", (WIDTH, HEIGHT), self.palette["page"])
        pen = ImageDraw.Draw(image)
        floor = HEIGHT - FOOT
        left_N = 8 + self.step * (column_N + 0.4 * np.floor(column_N / self.node))
        low_N, high_N = floor - self.unit * bottom_N, floor - self.unit * (bottom_N + height_N)
        corners = np.stack([left_N, high_N, left_N + 0.84 * self.step, low_N], 1).tolist()
        edges = [self.palette["page"] if tall else None for tall in low_N - high_N > THIN]
        for corner, fill, edge in zip(corners, fills, edges, strict=True):
            pen.rectangle(corner, fill=fill, outline=edge)
        mean = floor - self.unit
        for x in range(8, WIDTH - 8, 10):
            pen.line((x, mean, x + 5, mean), fill=self.palette["ink"])
        pen.text((8, 10), words, font=self.font, fill=self.palette["ink"])
        return image


def _encoded(frames: list[Image.Image], palette: dict[str, str], fills: Sequence[str]) -> bytes:
    """All frames on one palette, which has the page's own colour exactly; at rest at both ends."""
    page, ink = (np.array(ImageColor.getrgb(palette[name])) for name in ("page", "ink"))
    shades = [tuple(np.rint(page + (ink - page) * share / 6).astype(int)) for share in range(7)]
    common = Image.new("P", (1, 1))
    colours = [*shades, *map(ImageColor.getrgb, dict.fromkeys(fills))]
    common.putpalette([int(value) for colour in colours for value in colour])
    small = [frame.quantize(palette=common, dither=Image.Dither.NONE) for frame in frames]
    file = io.BytesIO()
    times = [REST_MS, *[FRAME_MS] * (len(small) - 2), 2 * REST_MS]
    small[0].save(file, "GIF", save_all=True, append_images=small[1:], duration=times, loop=0)
    return file.getvalue()
