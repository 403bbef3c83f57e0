"""What the loader yields: W bytes of text, V visual tokens of C numbers."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Sample:
    """One caption and its picture or clip, cut into tokens; unpatchify gives the frames back."""

    id: int  # number of the draw in the canonical order, unique within a run
    key: str  # "source/shard name/key"
    source: str
    text_W: np.ndarray  # uint8 UTF-8 bytes of the caption; W may be 0
    patch_VC: np.ndarray  # uint8, C = patch_time * patch * patch * 3
    position_V3: np.ndarray  # int32 (t, h, w) of each token in the grid
    grid: tuple[int, int, int]  # steps of time, rows, columns

    @property
    def tokens(self) -> int:
        """Text and visual tokens."""
        return len(self.text_W) + len(self.patch_VC)


def reason_of(error: Exception) -> str:
    """What a decoder's exception says, without numbers and addresses."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


@dataclass(frozen=True)
class Report:
    """`samples` lost (0 is a note) in a shard, under a key, for a reason."""

    shard: str
    key: str
    reason: str
    samples: int = 1

    def __str__(self) -> str:
        return ": ".join(part for part in (self.shard, self.key, self.reason) if part)
