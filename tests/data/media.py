"""Real pictures, clips and shards for the tests, small and built on the spot."""

import io
import struct
import tarfile
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from data.config import DataConfig, SourceConfig

# White background for pictures of a solid colour that need an edge.
RED, GREEN, BLUE = (200, 30, 30), (30, 180, 30), (30, 30, 200)


def picture(
    width: int = 16, height: int = 16, colour: Any = RED, mode: str = "RGB", kind: str = "PNG", **save: Any
) -> bytes:
    content = io.BytesIO()
    Image.new(mode, (width, height), colour).save(content, kind, **save)
    return content.getvalue()


def encoded(image: Image.Image, kind: str = "PNG", **save: Any) -> bytes:
    content = io.BytesIO()
    image.save(content, kind, **save)
    return content.getvalue()


def ramp(number: int, width: int, height: int) -> np.ndarray:
    """A frame whose gray tells its number: 10 for the first, 10 more for each that follows."""
    return np.full((height, width, 3), 10 + 10 * number, np.uint8)


def clip(
    path: Path,
    frames: Iterable[np.ndarray] | int = 8,
    *,
    codec: str = "libx264",
    fps: int = 8,
    size: tuple[int, int] = (32, 16),
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
    ratio: tuple[int, int] | None = None,
    audio: bool = False,
) -> bytes:
    """A clip in the container that the suffix of `path` names; a number of frames makes so many ramps."""
    if isinstance(frames, int):
        frames = [ramp(number, *size) for number in range(frames)]
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=fps, options=codec_options or {})
        stream.width, stream.height, stream.pix_fmt = *size, pix_fmt
        stream.codec_context.thread_count = 1
        if ratio is not None:
            stream.codec_context.sample_aspect_ratio = Fraction(*ratio)
        sound = container.add_stream("aac", rate=8000) if audio else None
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
        if sound is not None:
            tone(container, sound)
    return path.read_bytes()


def tone(container: Any, sound: Any) -> None:
    frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
    frame.sample_rate = 8000
    container.mux(sound.encode(frame))
    container.mux(sound.encode())


def sound_only(path: Path) -> bytes:
    with av.open(str(path), "w") as container:
        tone(container, container.add_stream("aac", rate=8000))
    return path.read_bytes()


def with_matrix(mp4: bytes, a: int, b: int, c: int, d: int) -> bytes:
    """The mp4 with another display matrix in its track header."""
    start = mp4.find(b"tkhd") + 4 + 4 + 20 + 8 + 8
    one = 65536
    return (
        mp4[:start]
        + struct.pack(">9i", a * one, b * one, 0, c * one, d * one, 0, 0, 0, 1 << 30)
        + mp4[start + 36 :]
    )


def tar(path: Path, members: Iterable[tuple[str, bytes]], **header: Any) -> Path:
    """A tar of members in order, doubles allowed."""
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            for key, value in header.items():
                setattr(info, key, value)
            file.addfile(info, io.BytesIO(content))
    return path


def pairs(count: int, prefix: str = "x") -> list[tuple[str, bytes]]:
    """Members of `count` samples, each picture with a colour of its own and its key as the caption."""
    members = []
    for number in range(count):
        key = f"{prefix}{number:04d}"
        members += [
            (f"{key}.png", picture(colour=(number % 256, number // 256, 7))),
            (f"{key}.txt", key.encode()),
        ]
    return members


def config(shards: Any, **settings: Any) -> DataConfig:
    """One source `s`, small pictures, no workers."""
    given = {
        "picture_pixels": 64,
        "clip_pixels": 64,
        "clip_frames": 8,
        "workers": 0,
        "streams": 8,
        "timeout": 1.0,
    }
    return DataConfig(sources={"s": SourceConfig(shards)}, **(given | settings))  # type: ignore[arg-type]
