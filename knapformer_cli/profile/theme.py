"""One drawing, three outputs: a PNG, and SVGs for wide and for narrow pages whose colours follow the page.

Lengths are points; a point of a drawing is about a pixel of the page.
"""

import io
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

# Every value is unique: in an SVG it becomes the CSS variable of its name. Sources go from cool to warm, as
# Paul Tol's diverging schemes do, which stay apart for all common forms of colour blindness.
LIGHT = {
    "page": "#fefefd",
    "ink": "#1c2230",
    "muted": "#5a6575",
    "line": "#d5dae1",
    "accent": "#0a5fb4",
    "alarm": "#b3261e",
    "s0": "#364b9a",
    "s1": "#4a7bb7",
    "s2": "#6ea6cd",
    "s3": "#98cae1",
    "s4": "#feda8b",
    "s5": "#fdb366",
    "s6": "#f67e4b",
    "s7": "#dd3d2d",
    "rest": "#b4bac3",
    "q0": "#dbe9f4",
    "q1": "#b0d0e8",
    "q2": "#78aed6",
    "q3": "#3f83bc",
    "q4": "#17518f",
    "compute": "#7f93ab",
    "waiting": "#e2705c",
    "exchange": "#f2b263",
    "routing": "#c9a0c4",
    "gradients": "#8cc3ba",
    "optimizer": "#c8ccd2",
}
DARK = {
    "page": "#14171d",
    "ink": "#e8ebf0",
    "muted": "#a3adbb",
    "line": "#363d49",
    "accent": "#74b3f5",
    "alarm": "#ff8d80",
    "s0": "#7287dc",
    "s1": "#6a9fdc",
    "s2": "#86b9de",
    "s3": "#b2dcec",
    "s4": "#f5d37e",
    "s5": "#f4a95e",
    "s6": "#ee7c4c",
    "s7": "#e45445",
    "rest": "#7c8694",
    "q0": "#1d2f45",
    "q1": "#274b72",
    "q2": "#3672ab",
    "q3": "#629fd8",
    "q4": "#b3d7f7",
    "compute": "#75879d",
    "waiting": "#df6a57",
    "exchange": "#e3a352",
    "routing": "#b98cb4",
    "gradients": "#6fb0a5",
    "optimizer": "#8b929c",
}
WIDE, NARROW, TITLE = 960, 350, 34  # points: widths, and the room for a PNG's title
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11.5,
    "text.color": LIGHT["ink"],
    "axes.edgecolor": LIGHT["line"],
    "axes.facecolor": "none",
    "axes.labelcolor": LIGHT["muted"],
    "axes.labelsize": 11.5,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlecolor": LIGHT["ink"],
    "figure.facecolor": LIGHT["page"],
    "grid.color": LIGHT["line"],
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.9,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "legend.handlelength": 1.0,
    "legend.handleheight": 1.0,
    "legend.columnspacing": 1.4,
    "legend.handletextpad": 0.5,
    "legend.borderaxespad": 0.0,
    "legend.borderpad": 0.0,
    "svg.fonttype": "none",
    "xtick.color": LIGHT["line"],
    "ytick.color": LIGHT["line"],
    "xtick.labelcolor": LIGHT["muted"],
    "ytick.labelcolor": LIGHT["muted"],
    "xtick.labelsize": 11,
    "ytick.labelsize": 11,
    "xtick.major.size": 3,
    "ytick.major.size": 3,
}


@dataclass(frozen=True, eq=False)
class Sheet:
    """What a drawing is painted on: `height` points below the title, WIDE or NARROW across."""

    figure: Figure
    wide: bool
    height: float

    @property
    def width(self) -> float:
        return WIDE if self.wide else NARROW

    def axes(self, left: float, bottom: float, right: float, top: float) -> Axes:
        """Axes with these margins to the sheet's edges."""
        whole = self.height + TITLE
        box = (
            left / self.width,
            bottom / whole,
            1 - (left + right) / self.width,
            (self.height - bottom - top) / whole,
        )
        return self.figure.add_axes(box)

    def legend(self, names: Mapping[str, str], columns: int, hatched: str = "") -> None:
        """Coloured squares and their names, along the top; `hatched` adds a word for hatching."""
        handles = [Rectangle((0, 0), 1, 1, color=colour) for colour in names.values()]
        labels = list(names)
        if hatched:
            handles.append(Rectangle((0, 0), 1, 1, facecolor="none", edgecolor=LIGHT["muted"], hatch="////"))
            labels.append(hatched)
        top = self.height / (self.height + TITLE)
        self.figure.legend(handles, labels, ncols=columns, loc="upper left", bbox_to_anchor=(0.0, top))


@dataclass(frozen=True, eq=False)
class Drawing:
    """A picture still to be painted; heights are of the wide and of the narrow sheet."""

    name: str
    title: str
    caption: str
    paint: Callable[[Sheet], None]
    heights: tuple[float, float]
    hover: dict[str, list[str]]  # by group id: what each of its paths says under the pointer


@dataclass(frozen=True, eq=False)
class Picture:
    name: str
    title: str
    caption: str
    png: bytes
    svgs: tuple[str, str]  # wide, narrow


def render(drawing: Drawing) -> Picture:
    """Paint once for wide pages and PNG, once for narrow pages."""
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": drawing.name}):
        wide, narrow = (_painted(drawing, is_wide) for is_wide in (True, False))
        svgs = tuple(_svg(drawing, sheet) for sheet in (wide, narrow))
        whole = wide.height + TITLE
        wide.figure.text(0.0, 1 - 6 / whole, drawing.title, size=15, weight="bold", va="top")
        png = io.BytesIO()
        FigureCanvasAgg(wide.figure)
        margin = Bbox([[-0.25, -0.25], [WIDE / 72 + 0.25, whole / 72 + 0.25]])
        wide.figure.savefig(png, format="png", dpi=120, bbox_inches=margin, pil_kwargs={"compress_level": 4})
    return Picture(drawing.name, drawing.title, drawing.caption, png.getvalue(), svgs)  # type: ignore[arg-type]


def _painted(drawing: Drawing, wide: bool) -> Sheet:
    height = drawing.heights[0 if wide else 1]
    figure = Figure(figsize=((WIDE if wide else NARROW) / 72, (height + TITLE) / 72))
    sheet = Sheet(figure, wide, height)
    drawing.paint(sheet)
    return sheet


def _svg(drawing: Drawing, sheet: Sheet) -> str:
    """SVG to be put into a page: ids of its own, text as text, the page's colours and font."""
    file = io.StringIO()
    FigureCanvasSVG(sheet.figure)
    sheet.figure.savefig(file, format="svg", transparent=True)
    text = file.getvalue()
    body = text[text.index("<svg") :]
    body = body[body.index(">") + 1 :]
    body = re.sub(r"\s*<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r"\s*<!--.*?-->", "", body, flags=re.DOTALL)
    # Coordinates to a hundredth of a point, which halves the file; numbers in words stay as they are.
    body = re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), body)
    body = re.sub(r"font: ([^;'\"]*)'DejaVu Sans'[^;\"]*", r"font: \1var(--font)", body)
    kind = "wide" if sheet.wide else "narrow"
    for group, words in drawing.hover.items():
        body = _with_hover(body, group, words)
    prefix = f"{drawing.name}-{kind}-"
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r"url\(#", f"url(#{prefix}", body)
    body = re.sub(r'href="#', f'href="#{prefix}', body)
    for name, colour in LIGHT.items():
        body = body.replace(colour, f"var(--{name})")
    box = f"0 {TITLE} {sheet.width} {sheet.height:g}"
    label = escape(drawing.title, quote=True)
    return f'<svg class="{kind}" viewBox="{box}" role="img" aria-label="{label}">{body}'


def _with_hover(body: str, group: str, words: Iterable[str]) -> str:
    """The paths of a group, each with the words that the pointer shows."""
    begin = body.find(f'<g id="{group}">')
    if begin < 0:
        return body
    end = body.index("</g>", begin)
    word = iter(words)
    titled = re.sub(
        r"<path ([^>]*)/>",
        lambda path: f"<path {path[1]}><title>{escape(next(word))}</title></path>",
        body[begin:end],
    )
    return body[:begin] + titled + body[end:]


def source_colours(names: list[str]) -> dict[str, str]:
    """A colour for each source, given in order of their work; beyond eight the last ones share one."""
    count = len(names)
    if count > 8:
        return {name: LIGHT[f"s{i}"] if i < 8 else LIGHT["rest"] for i, name in enumerate(names)}
    places = [round(i * 7 / (count - 1)) for i in range(count)] if count > 1 else [1]
    return {name: LIGHT[f"s{place}"] for name, place in zip(names, places, strict=True)}
