"""Sample pictures and clips as files that people look at: a grid PNG, an animated GIF, a film strip."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

GAP, INK, PAPER = 6, (40, 40, 40), (250, 250, 248)
_CELL = 96  # pixels a drawing is enlarged to, at least


def save_pictures(path: Path, prompts: Sequence[str], drawings: Sequence[np.ndarray]) -> list[Path]:
    """Write the first frames of uint8 [F, H, W, 3] drawings as one PNG, a column a prompt; returns [path]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grid([drawing[0] for drawing in drawings], prompts).save(path)
    return [path]


def save_clips(path: Path, prompts: Sequence[str], drawings: Sequence[np.ndarray], fps: float) -> list[Path]:
    """Write uint8 [F, H, W, 3] drawings as an animated GIF, a column a prompt; returns what was written.

    The first of each prompt also becomes a row of a film strip, a PNG beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    frames = [grid([drawing[f] for drawing in drawings], prompts) for f in range(len(drawings[0]))]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=round(1000 / fps), loop=0)
    strip(drawings[: len(prompts)], prompts).save(path.with_suffix(".png"))
    return [path, path.with_suffix(".png")]


def grid(drawings: Sequence[np.ndarray], captions: Sequence[str]) -> Image.Image:
    """uint8 [H, W, 3] drawings in rows as long as `captions`, which stand above their columns."""
    return _sheet(drawings, len(captions), captions, [])


def strip(clips: Sequence[np.ndarray], captions: Sequence[str]) -> Image.Image:
    """A row of frames for each uint8 [F, H, W, 3] clip, its caption above it."""
    return _sheet([frame for clip in clips for frame in clip], len(clips[0]), [], captions)


def _sheet(
    drawings: Sequence[np.ndarray], columns: int, heads: Sequence[str], titles: Sequence[str]
) -> Image.Image:
    height, width = drawings[0].shape[:2]
    scale = max(1, -(-_CELL // max(height, width)))
    cell_w, cell_h = width * scale, height * scale
    font = ImageFont.load_default(12)
    heads = [_fit(text, cell_w, font) for text in heads]
    line = 16
    head_h = line * max((text.count("\n") + 1 for text in heads), default=0)
    title_h = line if titles else 0
    rows = -(-len(drawings) // columns)
    size = (columns * (cell_w + GAP) + GAP, head_h + rows * (cell_h + title_h + GAP) + GAP)
    sheet = Image.new("RGB", size, PAPER)
    pen = ImageDraw.Draw(sheet)
    for column, text in enumerate(heads):
        pen.multiline_text((GAP + column * (cell_w + GAP), GAP // 2), text, INK, font, spacing=1)
    for number, drawing in enumerate(drawings):
        row, column = divmod(number, columns)
        x, y = GAP + column * (cell_w + GAP), GAP + head_h + row * (cell_h + title_h + GAP)
        if titles and column == 0:
            pen.text((x, y - GAP // 2), titles[row], INK, font)
        picture = Image.fromarray(drawing).resize((cell_w, cell_h), Image.Resampling.NEAREST)
        sheet.paste(picture, (x, y + title_h))
    return sheet


def _fit(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The caption in lines no wider than its column."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        lines = [*lines[:-1], longer] if font.getlength(longer) <= width or not lines[-1] else [*lines, word]
    return "\n".join(lines)
