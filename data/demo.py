"""The embedded demo set: scikit-learn's scanned digits as pictures and as clips of digits moving, in words.

A digit fills its picture, so that a picture sampled by a model, brought down to 8x8, can be judged by a
classifier of the original digits.
"""

import io
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import av
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from webdataset import TarWriter

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SIZES = ((14, 14), (16, 16), (24, 24), (14, 18), (18, 24), (14, 22), (18, 14), (24, 18), (22, 14))
CLIP_HEIGHTS = (20, 24, 28)
CLIPS, CLIPS_A_SHARD, PICTURES_A_SHARD = 480, 160, 600
FRAMES, FPS = 8, 8
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}


def make_demo(folder: Path, seed: int = 0) -> list[Path]:
    """Writes pictures-*.tar and clips-*.tar into `folder`, byte-identical for a seed; returns their paths.

    The folder appears whole or not at all; one that exists is left as it is, and its shards are returned.
    """
    folder = Path(folder)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        built = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            write_shards(built / "pictures", pictures(seed), PICTURES_A_SHARD)
            write_shards(built / "clips", clips(seed), CLIPS_A_SHARD)
            built.chmod(0o755)
            built.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was first
                raise
        finally:
            shutil.rmtree(built, ignore_errors=True)
    return sorted(folder.glob("*.tar"))


def write_shards(stem: Path, samples: Iterator[dict[str, str | bytes]], per_shard: int) -> None:
    listed = list(samples)
    for number, start in enumerate(range(0, len(listed), per_shard)):
        with open(f"{stem}-{number:06d}.tar", "wb") as file, TarWriter(file, mtime=0) as writer:
            for sample in listed[start : start + per_shard]:
                writer.write(sample)


def pictures(seed: int) -> Iterator[dict[str, str | bytes]]:
    """Every digit once, in a size and an aspect ratio of its own."""
    generator = np.random.default_rng((seed, 0))
    images_D88, labels_D = scans()
    for number in generator.permutation(len(labels_D)).tolist():
        size = SIZES[generator.integers(len(SIZES))]
        content = io.BytesIO()
        enlarged(images_D88[number], size).save(content, "PNG")
        caption = f"a {WORDS[labels_D[number]]}"
        yield {"__key__": f"digit-{number:04d}", "png": content.getvalue(), "txt": caption}


def clips(seed: int) -> Iterator[dict[str, str | bytes]]:
    """A digit crossing a dark frame that is half as long again as high, or two side by side in step."""
    generator = np.random.default_rng((seed, 1))
    images_D88, labels_D = scans()
    for number in range(CLIPS):
        high = CLIP_HEIGHTS[generator.integers(len(CLIP_HEIGHTS))]
        chosen = generator.choice(len(labels_D), size=1 + (number % 4 == 3), replace=False).tolist()
        way = list(MOVES)[generator.integers(len(MOVES))]
        side = high * 5 // 6
        along, across = (high * 3 // 2, high) if len(chosen) == 1 else (high, 2 * side)
        width, height = (along, across) if MOVES[way][0] else (across, along)
        digits = [np.asarray(enlarged(images_D88[index], (side, side))) for index in chosen]
        frames = [draw_frame(digits, (width, height), way, step / (FRAMES - 1)) for step in range(FRAMES)]
        names = " and ".join(f"a {WORDS[labels_D[index]]}" for index in chosen)
        direction = f"to the {way}" if way in ("left", "right") else way
        yield {"__key__": f"clip-{number:04d}", "mp4": encode(frames), "txt": f"{names} moving {direction}"}


def scans() -> tuple[np.ndarray, np.ndarray]:
    """([1797, 8, 8] uint8, labels): bright strokes on black."""
    digits = load_digits()
    return np.rint(digits.images * (255 / 16)).astype(np.uint8), digits.target


def enlarged(image_88: np.ndarray, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(image_88).resize(size, Image.Resampling.BICUBIC)


def draw_frame(digits: Sequence[np.ndarray], size: tuple[int, int], way: str, time: float) -> np.ndarray:
    """uint8 [H, W] at a time from 0 to 1; two digits stand side by side, across the way they move."""
    width, height = size
    canvas_HW = np.zeros((height, width), np.uint8)
    across, down = MOVES[way]
    for number, digit in enumerate(digits):
        side = len(digit)
        rest = number * side if len(digits) > 1 else None
        left = round((width - side) * (time if across > 0 else 1 - time)) if across else rest
        top = round((height - side) * (time if down > 0 else 1 - time)) if down else rest
        x = (width - side) // 2 if left is None else left
        y = (height - side) // 2 if top is None else top
        window = canvas_HW[y : y + side, x : x + side]
        np.maximum(window, digit, out=window)
    return canvas_HW


def encode(frames: Sequence[np.ndarray]) -> bytes:
    """An mp4 of gray frames with H.264, on one thread: with more, the bytes would depend on the machine."""
    content = io.BytesIO()
    height, width = frames[0].shape
    with av.open(content, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=FPS, options={"crf": "12", "preset": "fast"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.thread_count = 1
        for frame_HW in frames:
            rgb = np.repeat(frame_HW[..., None], 3, axis=2)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(rgb, format="rgb24")))
        container.mux(stream.encode())
    return content.getvalue()
