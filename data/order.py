"""The one order of global batches: a function of manifest, seed and settings, the same on all ranks.

No state but three small numbers for each source; no communication; ranks and workers are no part of it.
E samples of an epoch, N samples of a source, B shards, P pieces of shards.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from data.config import DataConfig, DataError
from data.geometry import shrink_grid
from data.manifest import Manifest, Source

VERSION = 1
BLOCK = 4096
# Whatever else the order depends on; resuming with another value would silently continue another run.
SETTINGS = (
    *("patch", "patch_time", "picture_pixels", "clip_pixels", "clip_frames", "clip_fps", "upscale"),
    *("max_text", "missing_caption", "cut_clip", "oversize", "streams"),
)


class Draw(NamedTuple):
    """Draw `number` is caption `caption` of sample `sample` in source `source`, on a canonical stream."""

    number: int
    source: int
    sample: int
    caption: int
    stream: int
    tokens: int
    grid: tuple[int, int, int]


def raw(seed: int, count: int, *purpose: str | int) -> np.ndarray:
    """[count] uint64 from a counter-based generator, whose raw output no version of numpy changes."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=16).digest()
    return np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(count)


def epoch_order(
    shard_N: np.ndarray, streams: int, seed: int, name: str, epoch: int
) -> tuple[np.ndarray, np.ndarray]:
    """(sample_E, stream_E): every sample once.

    Shards (cut into pieces where there are fewer than streams) are shuffled and dealt to the streams, samples
    are shuffled within a stream, streams take turns and drop out when they run dry. Indices are shuffled, not
    samples: no buffer, no bytes.
    """
    n_samples, n_shards = len(shard_N), int(shard_N.max()) + 1
    cuts = -(-streams // n_shards)
    sizes_B = np.bincount(shard_N, minlength=n_shards)
    place_N = np.arange(n_samples) - (np.cumsum(sizes_B) - sizes_B)[shard_N]
    piece_N = shard_N.astype(np.int64) * cuts + place_N * cuts // sizes_B[shard_N]
    # Empty pieces are dealt too: which stream a piece falls to depends on the number of shards alone.
    stream_P = np.empty(n_shards * cuts, np.int64)
    stream_P[np.argsort(raw(seed, n_shards * cuts, name, epoch, "shards"), kind="stable")] = (
        np.arange(n_shards * cuts) % streams
    )
    stream_N = stream_P[piece_N]
    shuffled_E = np.lexsort((raw(seed, n_samples, name, epoch, "samples"), stream_N))
    lengths = np.bincount(stream_N, minlength=streams)
    turn_E = np.arange(n_samples) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    by_turn_E = np.lexsort((stream_N[shuffled_E], turn_E))
    sample_E = shuffled_E[by_turn_E]
    return sample_E, stream_N[sample_E]


@dataclass
class Cursor:
    """Where a source stands: `offset` samples of `epoch` are drawn."""

    source: Source
    streams: int
    seed: int
    repeat: bool
    epoch: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        self.load()

    def load(self) -> None:
        self.sample_E, self.stream_E = epoch_order(
            self.source.shard_N, self.streams, self.seed, self.source.name, self.epoch
        )

    @property
    def dry(self) -> bool:
        return self.offset == len(self.source) and not self.repeat

    def peek(self) -> tuple[int, int, int]:
        """(sample, stream, epoch) of the next draw."""
        if self.offset == len(self.source):
            self.epoch, self.offset = self.epoch + 1, 0
            self.load()
        return int(self.sample_E[self.offset]), int(self.stream_E[self.offset]), self.epoch


class Order:
    """Iterates over (draws of a global batch, state after it), endlessly while every source repeats."""

    def __init__(
        self,
        config: DataConfig,
        manifest: Manifest,
        batch_tokens: int,
        seed: int,
        state: dict[str, Any] | None = None,
    ) -> None:
        check_fit(config, manifest, batch_tokens)
        self.manifest, self.batch_tokens, self.seed = manifest, batch_tokens, seed
        self.sources = [config.sources[source.name] for source in manifest.sources]
        self.settings = {name: getattr(config, name) for name in SETTINGS} | {
            "seed": seed,
            "batch_tokens": batch_tokens,
            "sources": {
                source.name: [float(given.weight), given.exhausted]
                for source, given in zip(manifest.sources, self.sources, strict=True)
            },
        }
        self.shards = manifest.digests()
        self.draws = self.batches = 0
        places = check_state(state, self.settings, self.shards) if state is not None else {}
        if state is not None:
            self.draws, self.batches = state["draws"], state["batches"]
        self.cursors = [
            Cursor(
                source, config.streams, seed, given.exhausted == "repeat", *places.get(source.name, (0, 0))
            )
            for source, given in zip(manifest.sources, self.sources, strict=True)
        ]
        self.block, self.chances = -1, [0.0]
        self.weigh()

    def __iter__(self) -> Iterator[tuple[list[Draw], dict[str, Any]]]:
        while True:
            draws: list[Draw] = []
            tokens = 0
            while draw := self.peek():
                if draws and tokens + draw.tokens > self.batch_tokens:
                    break
                draws.append(draw)
                tokens += draw.tokens
                self.take(draw)
            if not draws:
                return
            self.batches += 1
            yield draws, self.state()

    def peek(self) -> Draw | None:
        """The next draw, not yet taken; None when the run is over."""
        number = self.choose()
        if number is None:
            return None
        sample, stream, epoch = self.cursors[number].peek()
        source = self.manifest.sources[number]
        count = int(source.count_N[sample])
        # Several captions take turns, one an epoch.
        caption = epoch % count if count else 0
        text = int(source.length_M[source.first_N[sample] + caption]) if count else 0
        steps, rows, columns = source.grid_N3[sample].tolist()
        grid = steps, rows, columns
        if text + steps * rows * columns > self.batch_tokens and self.settings["oversize"] == "shrink":
            grid = shrink_grid(grid, self.batch_tokens - text)
        tokens = text + grid[0] * grid[1] * grid[2]
        return Draw(self.draws, number, sample, caption, stream, tokens, grid)

    def take(self, draw: Draw) -> None:
        cursor = self.cursors[draw.source]
        cursor.offset += 1
        self.draws += 1
        if cursor.dry:
            self.weigh()

    def weigh(self) -> None:
        """Running sums of the weights of the sources that are not dry; none where a dry one ends the run."""
        pairs = list(zip(self.sources, self.cursors, strict=True))
        over = any(cursor.dry and given.exhausted == "stop" for given, cursor in pairs)
        weights = [0.0 if cursor.dry else float(given.weight) for given, cursor in pairs]
        self.sums = [] if over or not any(weights) else list(accumulate(weights))

    def choose(self) -> int | None:
        """The source of the next draw, by weight; None when the run is over."""
        if not self.sums:
            return None
        block, place = divmod(self.draws, BLOCK)
        if block != self.block:
            self.block = block
            self.chances = ((raw(self.seed, BLOCK, "sources", block) >> 11) * 2.0**-53).tolist()
        # The largest sum is kept out, should the product round up to it.
        total = self.sums[-1]
        return bisect_right(self.sums, min(self.chances[place] * total, total * (1 - 2**-52)))

    def state(self) -> dict[str, Any]:
        """JSON-able; a new one, but for the parts that never change."""
        cursors = {cursor.source.name: [cursor.epoch, cursor.offset] for cursor in self.cursors}
        return {
            "version": VERSION,
            "batches": self.batches,
            "draws": self.draws,
            "cursors": cursors,
            "settings": self.settings,
            "shards": self.shards,
        }


def check_fit(config: DataConfig, manifest: Manifest, batch_tokens: int) -> None:
    """DataError naming the first sample that is larger than a global batch, unless the policy has a way."""
    if batch_tokens < 1:
        raise DataError(f"batch_tokens={batch_tokens} must be at least 1")
    if config.oversize == "alone":
        return
    for source in manifest.sources:
        most_N = source.most_tokens_N()
        if config.oversize == "shrink":
            # Shrinking leaves one visual token.
            most_N = most_N - source.visual_N() + 1
        if len(most_N) and most_N.max() > batch_tokens:
            worst = int(most_N.argmax())
            key = f"{source.name}/{source.names_B[source.shard_N[worst]]}/{source.key_N[worst]}"
            raise DataError(
                f"sample {key} has {most_N[worst]} tokens, more than the {batch_tokens} of a global batch; "
                "raise training.batch_tokens, lower the pixels, frames or text of data, or set data.oversize"
            )


def check_state(
    state: dict[str, Any], settings: dict[str, Any], shards: dict[str, str]
) -> dict[str, list[int]]:
    """The cursors of a state that belongs to these data; DataError naming what is different."""
    if state.get("version") != VERSION:
        raise DataError(
            f"the loader's state has version {state.get('version')}; this loader reads version {VERSION}"
        )
    for name, value in settings.items():
        before = state["settings"].get(name)
        if before != value:
            raise DataError(
                f"the loader's state was saved with {name}={before}, not {value}; resume with that"
            )
    before = state["shards"]
    for what, names in (
        ("removed", before.keys() - shards.keys()),
        ("added", shards.keys() - before.keys()),
        ("changed", {name for name in before.keys() & shards.keys() if before[name] != shards[name]}),
    ):
        if names:
            raise DataError(
                f"the data are not those of the loader's state: {len(names)} shards {what}, e.g. {min(names)}"
            )
    return state["cursors"]
