"""Where a rank is: the step and the part of it, kept in this process for whoever asks why it stands still."""

import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """`step` counts optimizer steps done, `name` says what the rank does or waits for, since when."""

    step: int | None
    name: str
    since: float  # time.monotonic()


_here = Phase(None, "start", time.monotonic())


def enter(name: str, step: int | None = None) -> None:
    """This rank begins `name`, in the step it was in or in `step`."""
    global _here
    _here = Phase(_here.step if step is None else step, name, time.monotonic())


def here() -> Phase:
    return _here
