"""All samples that a run can draw, as columns, and all that is known to be lost before it starts.

N samples of a source, M captions of all of them, B shards.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from threading import Event

import numpy as np

from data.config import DataConfig, DataError, check_config
from data.geometry import fit_frames, fit_grid
from data.index import Entry, ShardIndex, index_shard
from data.samples import Report
from data.shards import cache_folder, list_shards, locate, short_names

logger = logging.getLogger(__name__)

# Fetching and reading wait for disks and networks; decoders let go of the interpreter's lock.
THREADS = 8
NO_CAPTION = (0, 0, 0)


@dataclass(frozen=True, eq=False)
class Source:
    """The samples of one source in the order of its shards; sample n's captions are first_N[n] onwards."""

    name: str
    names_B: list[str]
    paths_B: list[str]
    digests_B: list[str]
    key_N: list[str]
    shard_N: np.ndarray  # int32
    clip_N: np.ndarray  # bool
    media_N3: np.ndarray  # int64 (offset, size, crc)
    caption_N3: np.ndarray  # int64; zeros for an absent caption
    extension_N: list[str]  # of the caption's member
    seconds_N: np.ndarray  # float64, 0 for pictures
    grid_N3: np.ndarray  # int32 (steps of time, rows, columns)
    first_N: np.ndarray
    count_N: np.ndarray
    length_M: np.ndarray  # bytes, cut at max_text

    def __len__(self) -> int:
        return len(self.key_N)

    def visual_N(self) -> np.ndarray:
        return self.grid_N3.astype(np.int64).prod(1)

    def most_tokens_N(self) -> np.ndarray:
        """Tokens with the longest caption of each sample."""
        longest_N = np.zeros(len(self), np.int64)
        np.maximum.at(longest_N, np.repeat(np.arange(len(self)), self.count_N), self.length_M)
        return self.visual_N() + longest_N


@dataclass(frozen=True, eq=False)
class Manifest:
    """The sources that have a weight, losses and notes, and the number of captions longer than max_text."""

    sources: tuple[Source, ...]
    reports: tuple[Report, ...]
    cut_captions: int

    @property
    def samples(self) -> int:
        return sum(len(source) for source in self.sources)

    @property
    def lost(self) -> int:
        return sum(report.samples for report in self.reports)

    def digests(self) -> dict[str, str]:
        """Content of every shard by "source/shard"."""
        return {
            f"{source.name}/{name}": digest
            for source in self.sources
            for name, digest in zip(source.names_B, source.digests_B, strict=True)
        }


def open_manifest(config: DataConfig, progress: Callable[[int, int], None] | None = None) -> Manifest:
    """Finds, fetches and indexes every shard; what it needed minutes for is stored for the next call.

    `progress(shards done, shards)` is called in this thread. DataError (a ValueError) for a shard that does
    not exist or cannot be fetched, an empty folder, a source without samples, more losses than
    data.max_failures.
    """
    check_config(config)
    urls = {
        name: list_shards(name, source.shards) for name, source in config.sources.items() if source.weight > 0
    }
    opened = open_shards(config, urls, progress or (lambda done, total: None))
    sources, reports, cut_captions = [], [], 0
    for name, shards in opened.items():
        kept, lost = apply_policies(shards, config)
        source = make_source(name, shards, kept, config)
        sources.append(source)
        reports += lost
        cut_captions += sum(length > config.max_text for _, entry in kept for length in entry.lengths)
    for report in reports:
        logger.warning("%s", report)
    check_losses(config, [shard for shards in opened.values() for shard in shards], reports)
    for source in sources:
        if not len(source):
            raise DataError(f"data.sources.{source.name} has no sample that can be read" + first_of(reports))
    return Manifest(tuple(sources), tuple(reports), cut_captions)


@dataclass(frozen=True)
class Shard:
    """`name` is unique in its source, `label` ("source/name") in the manifest; `path` is on this machine."""

    name: str
    label: str
    path: str
    index: ShardIndex


def open_shards(
    config: DataConfig, urls: dict[str, list[str]], progress: Callable[[int, int], None]
) -> dict[str, list[Shard]]:
    """All shards of each source, opened side by side; the first error, or Ctrl-C, cancels the others."""
    cancel = Event()
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = {
            source: [
                pool.submit(open_shard, source, name, url, config, cancel.is_set)
                for name, url in zip(short_names(listed), listed, strict=True)
            ]
            for source, listed in urls.items()
        }
        every = [job for listed in jobs.values() for job in listed]
        try:
            for done, job in enumerate(as_completed(every), 1):
                job.result()
                progress(done, len(every))
        except BaseException:
            cancel.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {source: [job.result() for job in listed] for source, listed in jobs.items()}


def open_shard(source: str, name: str, url: str, config: DataConfig, cancelled: Callable[[], bool]) -> Shard:
    """With missing_shard=skip, an empty index in place of an error."""
    label = f"{source}/{name}"
    try:
        path = locate(url, config, cancelled)
        return Shard(name, label, str(path), index_shard(path, label, cache_folder(config)))
    except (DataError, OSError) as error:
        if config.missing_shard == "skip":
            lost = Report(label, "", f"the whole shard is lost: {error}", 0)
            return Shard(name, label, url, ShardIndex([], [lost], "", 0))
        if isinstance(error, DataError):
            raise
        raise DataError(f"the shard {url} cannot be read: {error}") from None


def apply_policies(shards: list[Shard], config: DataConfig) -> tuple[list[tuple[int, Entry]], list[Report]]:
    """([(number of its shard, sample that is kept)], losses and notes)."""
    kept, reports = [], []
    for number, shard in enumerate(shards):
        reports += shard.index.lost
        for entry in shard.index.entries:
            report = apply_policy(entry, config)
            if report is not None:
                reports.append(replace(report, shard=shard.label))
            if report is None or not report.samples:
                kept.append((number, entry))
    return kept, reports


def make_source(name: str, shards: list[Shard], kept: list[tuple[int, Entry]], config: DataConfig) -> Source:
    """The columns of one source."""
    entries = [entry for _, entry in kept]
    clip_N = np.array([entry.kind == "clip" for entry in entries], bool)
    seconds_N = np.array([entry.seconds for entry in entries], np.float64)
    count_N = np.array([len(entry.lengths) for entry in entries], np.int64)
    length_M = np.array([length for entry in entries for length in entry.lengths], np.int64)
    return Source(
        name=name,
        names_B=[shard.name for shard in shards],
        paths_B=[shard.path for shard in shards],
        digests_B=[shard.index.digest for shard in shards],
        key_N=[entry.key for entry in entries],
        shard_N=np.array([number for number, _ in kept], np.int32),
        clip_N=clip_N,
        media_N3=np.array([entry.media for entry in entries], np.int64).reshape(-1, 3),
        caption_N3=np.array([entry.caption or NO_CAPTION for entry in entries], np.int64).reshape(-1, 3),
        extension_N=[entry.extension for entry in entries],
        seconds_N=seconds_N,
        grid_N3=grids(entries, clip_N, seconds_N, config),
        first_N=np.cumsum(count_N) - count_N,
        count_N=count_N,
        length_M=np.minimum(length_M, config.max_text),
    )


def apply_policy(entry: Entry, config: DataConfig) -> Report | None:
    """A loss (one sample), a note (none), or nothing."""
    if entry.cut:
        return Report("", entry.key, f"the clip is cut: {entry.cut}", int(config.cut_clip == "skip"))
    if entry.lacks:
        return Report("", entry.key, entry.lacks, int(config.missing_caption == "skip"))
    return None


def grids(entries: list[Entry], clip_N: np.ndarray, seconds_N: np.ndarray, config: DataConfig) -> np.ndarray:
    """[N, 3] token grids."""
    width_N = np.array([entry.width for entry in entries], np.int64)
    height_N = np.array([entry.height for entry in entries], np.int64)
    grid_N3 = np.ones((len(entries), 3), np.int32)
    grid_N3[clip_N, 0] = fit_frames(seconds_N[clip_N], config.clip_frames, config.clip_fps, config.patch_time)
    for mask_N, pixels in ((clip_N, config.clip_pixels), (~clip_N, config.picture_pixels)):
        sides = fit_grid(width_N[mask_N], height_N[mask_N], pixels, config.patch, config.upscale)
        grid_N3[mask_N, 1], grid_N3[mask_N, 2] = sides
    return grid_N3


def check_losses(config: DataConfig, shards: list[Shard], reports: list[Report]) -> None:
    """DataError when the budget of failures is spent; a shard that is lost whole counts as one sample."""
    spent = sum(max(report.samples, int(not report.key)) for report in reports)
    if spent > config.max_failures:
        raise DataError(
            f"{spent} samples are lost, more than data.max_failures={config.max_failures}" + first_of(reports)
        )
    run = max(shard.index.run for shard in shards)
    if run >= config.max_failures_in_a_row:
        raise DataError(
            f"{run} samples in a row are lost; data.max_failures_in_a_row={config.max_failures_in_a_row} "
            "ends the run" + first_of(reports)
        )


def first_of(reports: list[Report]) -> str:
    first = next((report for report in reports if report.samples or not report.key), None)
    return f"; the first: {first}" if first else ""
