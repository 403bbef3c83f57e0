"""Synthetic workloads: the lengths of a global batch from a code such as the paper's tables use.

S sequences, numbered by home rank.
"""

import re

import numpy as np

PATCH = 16
MOST_TEXT = 392
TIME_COMPRESSION = 3.4
PART = re.compile(r"g(\d+)b(\d+)i(\d+)f(\d+)s([01])")

PRESETS = {
    "paper_lowres": "g32b32i256f1s0",
    "paper_mixres": "g16b4i256f1s0,g4b5i512f1s0,g4b5i1024f1s0,g8b1i2048f1s0",
    "paper_joint": (
        "g8b4i256f1s0,g2b5i512f1s0,g2b5i1024f1s0,g4b1i2048f1s0,"
        "g1b10i256f4s0,g3b1i512f4s0,g8b2i256f85s1,g4b1i512f85s1"
    ),
}


def synthetic_lengths(code: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(len_S, home_S) int64 of a preset, or of parts gXbYiZfFsS joined by commas.

    The codes of KnapFormer (arXiv 2508.06001). A part is X ranks with Y samples each, of Z x Z pixels and F
    frames; S=1 divides frames by 3.4, a video autoencoder's compression. A sample has (Z/16)^2 visual tokens
    a frame times U(0.96, 1.04), and 0 to 392 text tokens. ValueError for a code that does not parse.
    """
    generator = np.random.default_rng(seed)
    lengths, homes, rank = [], [], 0
    for part in PRESETS.get(code, code).split(","):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{part!r} is no length code; write gXbYiZfFsS, e.g. g8b4i256f1s0, or {', '.join(PRESETS)}"
            )
        ranks, samples, pixels, frames, compressed = map(int, match.groups())
        steps = max(round(frames / TIME_COMPRESSION), 1) if compressed else frames
        count = ranks * samples
        visual_S = (pixels // PATCH) ** 2 * steps * generator.uniform(0.96, 1.04, count)
        text_S = generator.integers(0, MOST_TEXT, count, endpoint=True)
        lengths.append(np.rint(visual_S).astype(np.int64) + text_S)
        homes.append(np.repeat(np.arange(rank, rank + ranks), samples))
        rank += ranks
    return np.concatenate(lengths), np.concatenate(homes)
