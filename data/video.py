"""Clips by PyAV: what a file really holds, and its frames at given times, upright, with square pixels.

F frames, H x W pixels, T packets.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import av
import numpy as np
from av.container import InputContainer
from av.sidedata.sidedata import Type
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from PIL import Image

from data.images import MAX_PIXELS, resize_rgb
from data.samples import reason_of

EXTENSIONS = frozenset(
    ("mp4", "m4v", "mov", "mkv", "webm", "flv", "mpg", "mpeg", "avi", "ts", "m2ts", "ogv", "3gp", "wmv")
)
# Containers only: a playlist named .mp4 must not open other files or addresses.
CONTAINERS = "mov,matroska,flv,mpeg,mpegts,avi,gif,ogg,asf,h264,hevc,mpegvideo,m4v,ivf"


@dataclass(frozen=True)
class ClipFacts:
    """Display size (upright, square pixels) and what is there to decode; `cut` says what is missing."""

    width: int
    height: int
    frames: int
    seconds: float
    cut: str


def probe_clip(content: bytes) -> ClipFacts:
    """Reads every packet and decodes the first frame, since headers may declare too much or nothing.

    Raises what PyAV raises, or ValueError with the reason for which the file is no clip.
    """
    with open_clip(content) as (container, stream):
        packets, end, first = 0, 0.0, None
        times: list[float | None] = []
        try:
            for packet in container.demux():
                if not packet.size:
                    continue
                if packet.pts is not None and packet.time_base is not None:
                    end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
                if packet.stream is not stream:
                    continue
                packets += 1
                if not packet.is_discard:
                    times.append(None if packet.pts is None else float(packet.pts * packet.time_base))
                if first is None:
                    first = first_frame(packet)
            first = first or next(iter(stream.codec_context.decode(None)), None)
        except av.error.FFmpegError as error:
            stopped = f"it breaks off ({reason_of(error)})"
        else:
            stopped = shortfall(container, stream, packets, end)
        if first is None:
            raise ValueError("no frame can be decoded" if packets else "the container holds no frame")
        if len(times) < 2:
            raise ValueError("it has one frame only; a clip needs two")
        width, height = display_size(first, stream)
        return ClipFacts(width, height, len(times), duration(times, stream), stopped)


def read_clip(
    content: bytes,
    n_frames: int,
    fps: float,
    size: tuple[int, int],
    seconds: float,
    background: tuple[int, int, int],
) -> np.ndarray:
    """uint8 [F, H, W, 3]: the frame on show at 0, 1/fps, 2/fps ... seconds; the last one stays on show.

    ValueError where decoding ends well before `seconds`, the length that the index found.
    """
    with open_clip(content) as (container, stream):
        picked: list[np.ndarray] = []
        reformatter = VideoReformatter()
        shown: VideoFrame | None = None
        time = 0.0
        for time, frame in timed_frames(container, stream):
            # A millisecond of slack: containers round their timestamps.
            while shown is not None and len(picked) < n_frames and len(picked) / fps < time - 1e-3:
                picked.append(to_rgb(shown, reformatter, size, background))
            shown = frame
            if len(picked) == n_frames:
                break
        if shown is None:
            raise ValueError("no frame can be decoded")
        last = min(seconds, (n_frames - 1) / fps)
        if len(picked) < n_frames and time + 2 * seconds_per_frame(stream) + 1 / fps < last:
            raise ValueError(f"decoding ends after {time:.2f} of {seconds:.2f} seconds")
        if len(picked) < n_frames:
            picked += [to_rgb(shown, reformatter, size, background)] * (n_frames - len(picked))
        return np.stack(picked)


@contextmanager
def open_clip(content: bytes) -> Iterator[tuple[InputContainer, VideoStream]]:
    if not content:
        raise ValueError("0 bytes")
    with av.open(io.BytesIO(content), "r", options={"format_whitelist": CONTAINERS}) as container:
        # An album cover is a video stream by name only.
        covers = av.stream.Disposition.attached_pic
        streams = [stream for stream in container.streams.video if not stream.disposition & covers]
        if not streams:
            raise ValueError("the container has no video stream")
        stream = streams[0]
        context = stream.codec_context
        if context is None:
            raise ValueError("its codec is unknown here")
        if context.width * context.height > MAX_PIXELS:
            raise ValueError(f"{context.width}x{context.height} pixels; the most is {MAX_PIXELS}")
        # Some containers tell the size only while decoding.
        context.options = {"max_pixels": str(MAX_PIXELS)}
        # The loader's workers are the parallelism; a thread pool for each clip would only cost memory.
        context.thread_count = 1
        yield container, stream


def timed_frames(container: InputContainer, stream: VideoStream) -> Iterator[tuple[float, VideoFrame]]:
    """Frames with seconds since the first; counted at the nominal rate where there are no timestamps.

    A decoding error ends the clip: what it lost is measured by the caller.
    """
    start: float | None = None
    try:
        for number, frame in enumerate(container.decode(stream)):
            time = number * seconds_per_frame(stream) if frame.time is None else float(frame.time)
            start = time if start is None else start
            yield time - start, frame
    except av.error.FFmpegError:
        return


def first_frame(packet: av.Packet) -> VideoFrame | None:
    """The first frame that the packet completes; a damaged packet completes none."""
    try:
        return next((frame for frame in packet.decode() if isinstance(frame, VideoFrame)), None)
    except av.error.InvalidDataError:
        return None


def shortfall(container: InputContainer, stream: VideoStream, packets: int, end: float) -> str:
    """How the packets fall short of what the container declares, if they do and it declares anything."""
    if stream.frames > packets:
        return f"it holds {packets} of {stream.frames} frames"
    declared = (container.duration or 0) / 1e6
    found = end - (container.start_time or 0) / 1e6
    # Declared durations are rough, and include the last frame's.
    if found < 0.8 * declared - 2 * seconds_per_frame(stream):
        return f"it holds {found:.2f} of {declared:.2f} seconds"
    return ""


def duration(times: list[float | None], stream: VideoStream) -> float:
    """Seconds on show, the last frame's too; counted in frames where timestamps are missing or all equal."""
    known = sorted(time for time in times if time is not None)
    if len(known) == len(times) and known[-1] > known[0]:
        gaps = sorted(after - before for before, after in pairwise(known))
        return known[-1] - known[0] + gaps[len(gaps) // 2]
    return len(times) * seconds_per_frame(stream)


def seconds_per_frame(stream: VideoStream) -> float:
    rate = stream.average_rate or stream.guessed_rate
    return 1 / float(rate) if rate else 1 / 25


def display_size(frame: VideoFrame, stream: VideoStream) -> tuple[int, int]:
    """(width, height) as shown: pixels made square, then turned."""
    ratio = stream.sample_aspect_ratio
    width = max(round(frame.width * float(ratio)), 1) if ratio else frame.width
    return (frame.height, width) if turn_of(frame)[0] else (width, frame.height)


def turn_of(frame: VideoFrame) -> tuple[bool, bool, bool]:
    """(swap the axes, then flip horizontally, then vertically) from the display matrix, to quarter turns.

    The matrix takes a stored pixel (x, y) to (a x + c y, b x + d y) on the screen.
    """
    side_data: Any = frame.side_data  # a mapping, whatever its stub says
    if Type.DISPLAYMATRIX not in side_data:
        return False, False, False
    a, b, _, c, d = np.frombuffer(side_data[Type.DISPLAYMATRIX], "=i4", count=5).tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        return True, c < 0, b < 0
    return False, a < 0, d < 0


def to_rgb(
    frame: VideoFrame, reformatter: VideoReformatter, size: tuple[int, int], background: tuple[int, int, int]
) -> np.ndarray:
    """uint8 [H, W, 3] upright in the given size."""
    has_alpha = frame.format.name.startswith(("rgba", "bgra", "argb", "abgr", "yuva", "gbrap", "ya", "pal8"))
    # One thread, once more: PyAV's default starts a pool of them for every frame.
    converted = reformatter.reformat(frame, format="rgba" if has_alpha else "rgb24", threads=1)
    pixels_HWC = converted.to_ndarray()
    swap, mirror, flip = turn_of(frame)
    if swap:
        pixels_HWC = pixels_HWC.transpose(1, 0, 2)
    pixels_HWC = pixels_HWC[:: -1 if flip else 1, :: -1 if mirror else 1]
    return resize_rgb(Image.fromarray(np.ascontiguousarray(pixels_HWC)), size, background)
