"""What a user can set about the data, and the rules that the values obey."""

from dataclasses import dataclass, field
from typing import Any


class DataError(ValueError):
    """The data cannot be used as configured; one sentence says which and why."""


@dataclass
class SourceConfig:
    """One set of shards and its share of the draws.

    `shards` is a path, folder, glob, URL (http, https, pipe, and what webdataset opens) or brace list of
    these, or a list of them. `weight` is the share of samples, relative to the other sources' weights; 0 is
    never drawn nor opened. `exhausted` says what follows a source's last sample: `repeat` its next epoch,
    `drop` it from the mixture, or `stop` the run.
    """

    shards: Any = None
    weight: float = 1.0
    exhausted: str = "repeat"


@dataclass
class DataConfig:
    """The mixture, the size of a token, and what happens to samples that are broken or do not fit."""

    sources: dict[str, SourceConfig] = field(default_factory=dict)
    demo: str = ""  # folder in which the demo set is made when it is missing
    codes: str = ""  # lengths without samples, to profile with (data/codes.py); instead of sources

    patch: int = 2  # pixels on each side of a token
    patch_time: int = 1  # frames in a token; a picture's one frame is repeated
    picture_pixels: int = 65536  # pixels a picture is brought down to
    clip_pixels: int = 65536  # pixels a frame of a clip is brought down to
    clip_frames: int = 16  # most frames of a clip
    clip_fps: float = 8.0  # frames a second that a clip is sampled at, by its timestamps
    upscale: bool = False  # bring smaller pictures up to the budget as well
    background: list[int] = field(default_factory=lambda: [255, 255, 255])  # under transparent pixels, RGB
    max_text: int = 256  # bytes of a caption; the rest is cut at a character's end

    missing_caption: str = "skip"  # skip | empty: a sample without caption is lost, or has an empty one
    cut_clip: str = "skip"  # skip | keep: a clip that ends early is lost, or is as long as what is there
    missing_shard: str = "refuse"  # refuse | skip: a shard that cannot be had ends the run, or is lost
    oversize: str = "refuse"  # refuse | shrink | alone: a sample larger than the batch's budget of tokens
    max_failures: int = 1000  # lost samples (in the index; while reading, on each rank) that end the run
    max_failures_in_a_row: int = 100

    streams: int = 48  # canonical streams that fix the order; at least the number of ranks
    workers: int = 2  # decoding processes of each rank; 0 decodes in the training process
    prefetch: int = 2  # batches that each worker decodes ahead; their tokens bound its memory
    cache: str = ""  # folder of fetched shards; empty is ~/.cache/knapformer
    timeout: float = 30.0  # seconds without data until a transfer counts as stalled
    retries: int = 3  # further attempts after a failed transfer

    @property
    def channels(self) -> int:
        """Numbers in one row of Sample.patch_VC."""
        return self.patch_time * self.patch * self.patch * 3


CHOICES = {
    "missing_caption": ("skip", "empty"),
    "cut_clip": ("skip", "keep"),
    "missing_shard": ("refuse", "skip"),
    "oversize": ("refuse", "shrink", "alone"),
}
LEAST = {
    "patch": 1,
    "patch_time": 1,
    "picture_pixels": 1,
    "clip_pixels": 1,
    "clip_frames": 1,
    "max_text": 0,
    "max_failures": 0,
    "max_failures_in_a_row": 1,
    "streams": 1,
    "workers": 0,
    "prefetch": 1,
    "retries": 0,
}


def check_config(config: DataConfig) -> None:
    """ValueError naming the first value that breaks a rule."""
    if config.codes:
        raise DataError(
            f"data.codes={config.codes} names lengths without pixels; profile plans with them, "
            "training needs data.sources"
        )
    for name, least in LEAST.items():
        if getattr(config, name) < least:
            raise DataError(f"data.{name}={getattr(config, name)} must be at least {least}")
    for name in ("clip_fps", "timeout"):
        if not 0 < getattr(config, name) < float("inf"):
            raise DataError(f"data.{name}={getattr(config, name)} must be a positive number")
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise DataError(f"data.{name}={getattr(config, name)} must be one of {', '.join(choices)}")
    if len(config.background) != 3 or not all(0 <= value <= 255 for value in config.background):
        raise DataError(f"data.background={list(config.background)} must be three numbers from 0 to 255")
    check_sources(config.sources)


def check_sources(sources: dict[str, SourceConfig]) -> None:
    if not sources:
        raise DataError("data.sources is empty; name at least one source with its shards")
    for name, source in sources.items():
        if not 0 <= source.weight < float("inf"):
            raise DataError(f"data.sources.{name}.weight={source.weight} must be zero or a positive number")
        if source.exhausted not in ("repeat", "drop", "stop"):
            raise DataError(
                f"data.sources.{name}.exhausted={source.exhausted} must be one of repeat, drop, stop"
            )
    if not any(source.weight > 0 for source in sources.values()):
        raise DataError("every data.sources.*.weight is 0; at least one must be positive")
