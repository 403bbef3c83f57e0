"""Whether a rank moves: the step it is in and when it last got on, kept in this process for its watch."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """`step` counts optimizer steps done; `since` is when the rank last got on (time.monotonic)."""

    step: int | None
    since: float


_here = Phase(None, time.monotonic())


def mark(step: int | None = None) -> None:
    """This rank gets on, in the step it was in or in `step`."""
    global _here
    _here = Phase(_here.step if step is None else step, time.monotonic())


def here() -> Phase:
    return _here
