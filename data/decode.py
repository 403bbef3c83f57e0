"""One draw's bytes to its Sample; runs in the loader's workers, which know only what the Ref says."""

import zlib
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import numpy as np

from data.captions import cut, read_captions
from data.config import DataConfig
from data.geometry import patchify
from data.images import read_picture
from data.index import Place, read_at
from data.manifest import Manifest
from data.order import Draw
from data.samples import Report, Sample, reason_of
from data.video import read_clip


class Ref(NamedTuple):
    """All that decoding one draw needs; `seconds` is 0 for a picture, `choice` the number of the caption."""

    id: int
    source: str
    shard: str
    key: str
    path: str
    media: Place
    caption: Place
    extension: str
    choice: int
    is_clip: bool
    seconds: float
    grid: tuple[int, int, int]


def make_ref(manifest: Manifest, draw: Draw) -> Ref:
    source, n = manifest.sources[draw.source], draw.sample
    shard = int(source.shard_N[n])
    return Ref(
        id=draw.number,
        source=source.name,
        shard=source.names_B[shard],
        key=source.key_N[n],
        path=source.paths_B[shard],
        media=Place(*source.media_N3[n].tolist()),
        caption=Place(*source.caption_N3[n].tolist()),
        extension=source.extension_N[n] if source.count_N[n] else "",
        choice=draw.caption,
        is_clip=bool(source.clip_N[n]),
        seconds=float(source.seconds_N[n]),
        grid=draw.grid,
    )


@dataclass(frozen=True)
class Decoder:
    """What is the same for all draws of a run."""

    patch: int
    patch_time: int
    fps: float
    max_text: int
    background: tuple[int, int, int]

    @classmethod
    def of(cls, config: DataConfig) -> "Decoder":
        red, green, blue = config.background
        return cls(config.patch, config.patch_time, config.clip_fps, config.max_text, (red, green, blue))

    def __getitem__(self, refs: list[Ref]) -> list[Sample | Report]:
        """The samples of one batch in order, with a report in the place of each that cannot be decoded."""
        return [self.decode(ref) for ref in refs]

    def decode(self, ref: Ref) -> Sample | Report:
        try:
            with open(ref.path, "rb") as file:
                frames_FHW3 = self.frames(ref, read_checked(file, ref.media))
                text = read_caption(file, ref) if ref.extension else ""
            patch_VC, position_V3, grid = patchify(frames_FHW3, self.patch, self.patch_time)
        except Exception as error:  # decoders raise whatever they like at a broken file
            return Report(f"{ref.source}/{ref.shard}", ref.key, f"it cannot be decoded: {reason_of(error)}")
        assert grid == ref.grid, f"{ref.key}: {grid} is not the planned {ref.grid}"
        text_W = np.frombuffer(cut(text, self.max_text), np.uint8)
        return Sample(
            ref.id, f"{ref.source}/{ref.shard}/{ref.key}", ref.source, text_W, patch_VC, position_V3, grid
        )

    def frames(self, ref: Ref, content: bytes) -> np.ndarray:
        steps, rows, columns = ref.grid
        size = columns * self.patch, rows * self.patch
        if not ref.is_clip:
            return read_picture(content, size, self.background)[None]
        return read_clip(content, steps * self.patch_time, self.fps, size, ref.seconds, self.background)


def read_checked(file: BinaryIO, place: Place) -> bytes:
    content = read_at(file, place)
    if zlib.crc32(content) != place.crc:
        raise ValueError("the shard has changed since it was indexed")
    return content


def read_caption(file: BinaryIO, ref: Ref) -> str:
    return read_captions(read_checked(file, ref.caption), ref.extension)[ref.choice]
