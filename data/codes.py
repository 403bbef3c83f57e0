"""Synthetic workloads: the lengths of a global batch from a code such as the paper's tables use.

S sequences, numbered by home rank.
"""

import re
from dataclasses import dataclass

import numpy as np

PATCH = 16
MOST_TEXT = 392
TIME_COMPRESSION = 3.4
MOST_SEQUENCES = 10_000_000
PART = re.compile(r"g(\d{1,9})b(\d{1,9})i(\d{1,5})f(\d{1,5})s([01])")

PRESETS = {
    "paper_lowres": "g32b32i256f1s0",
    "paper_mixres": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "paper_joint": (
        "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,"
        "g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"
    ),
}


@dataclass(frozen=True)
class CodePart:
    """One part gXbYiZfFsS: `samples` on each of `ranks`, of pixels x pixels and `frames` frames."""

    text: str
    ranks: int
    samples: int
    pixels: int
    frames: int
    compressed: bool

    @property
    def visual(self) -> int:
        """Visual tokens of a sample, on average."""
        steps = max(round(self.frames / TIME_COMPRESSION), 1) if self.compressed else self.frames
        return (self.pixels // PATCH) ** 2 * steps

    @property
    def kind(self) -> str:
        """What its samples are, in words of pixels and frames."""
        size = f"{self.pixels} px"
        return f"{size} × {self.frames} frames" if self.frames > 1 else size


def parse_codes(code: str) -> list[CodePart]:
    """The parts of a preset's name or of a code; ValueError names the part that does not parse."""
    parts = []
    for text in PRESETS.get(code, code).split(","):
        match = PART.fullmatch(text.strip())
        if match is None:
            raise ValueError(
                f"{text!r} is no length code; write gXbYiZfFsS, e.g. g8b4i256f1s0, or {', '.join(PRESETS)}"
            )
        ranks, samples, pixels, frames, compressed = map(int, match.groups())
        if min(ranks, samples, frames) < 1 or pixels < PATCH:
            raise ValueError(
                f"length code {text!r} has no tokens; ranks, samples and frames are at least 1, "
                f"pixels at least {PATCH}"
            )
        parts.append(CodePart(text.strip(), ranks, samples, pixels, frames, bool(compressed)))
    if (total := sum(part.ranks * part.samples for part in parts)) > MOST_SEQUENCES:
        raise ValueError(f"length code {code!r} has {total:,} sequences; at most {MOST_SEQUENCES:,} can be")
    return parts


def synthetic_lengths(code: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(len_S, home_S) int64 of a preset, or of parts gXbYiZfFsS joined by commas.

    The codes of KnapFormer (arXiv 2508.06001). A part is X ranks with Y samples each, of Z x Z pixels and F
    frames; S=1 divides frames by 3.4, a video autoencoder's compression. A sample has (Z/16)^2 visual tokens
    a frame times U(0.96, 1.04), and 0 to 392 text tokens. ValueError for a code that does not parse.
    """
    generator = np.random.default_rng(seed)
    lengths, homes, rank = [], [], 0
    for part in parse_codes(code):
        count = part.ranks * part.samples
        visual_S = part.visual * generator.uniform(0.96, 1.04, count)
        text_S = generator.integers(0, MOST_TEXT, count, endpoint=True)
        lengths.append(np.rint(visual_S).astype(np.int64) + text_S)
        homes.append(np.repeat(np.arange(rank, rank + part.ranks), part.samples))
        rank += part.ranks
    return np.concatenate(lengths), np.concatenate(homes)


def repeated_lengths(code: str, ranks: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(len_S, home_S, part_S) of the code's workload on `ranks` ranks, which its own divide.

    The workload of a larger job is that of several jobs of the code's ranks, each with draws of its own.
    ValueError where the code's ranks do not divide `ranks`.
    """
    parts = parse_codes(code)
    own = sum(part.ranks for part in parts)
    if ranks % own:
        raise ValueError(f"length code {code!r} is for {own} ranks, which do not divide the job's {ranks}")
    times = ranks // own
    drawn = [synthetic_lengths(code, seed * times + replica) for replica in range(times)]
    part_S = np.repeat(np.arange(len(parts)), [part.ranks * part.samples for part in parts])
    home_S = np.concatenate([homes + own * replica for replica, (_, homes) in enumerate(drawn)])
    return np.concatenate([lens for lens, _ in drawn]), home_S, np.tile(part_S, times)
