"""Preemption: a signal asks, all ranks agree at a step, rank 0 leaves RUN/PREEMPTED behind.

USR1 (Slurm's warning before its time limit, or a person's) and TERM (scancel, or a launcher that was ended)
only set a flag here; `ahead.py` carries it to all ranks beside the lengths of a step: none stops alone.
"""

import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

MARKER = "PREEMPTED"
SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_asked = 0


def listen() -> None:
    """From now on this process notes the signals and goes on; those that came while blocked too."""
    global _asked
    _asked = 0
    for number in SIGNALS:
        signal.signal(number, _note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _note(number: int, frame: FrameType | None) -> None:
    global _asked
    _asked = _asked or number  # a second signal, also one during the save, changes nothing


def asked() -> int:
    """The first signal that asked this process to save and end; 0 while there was none."""
    return _asked


def write_marker(folder: Path, step: int, checkpoint: str | None, number: int) -> dict[str, Any]:
    """Write RUN/PREEMPTED, whole or not at all, and return what it says."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID")
    said = {
        "step": step,
        "checkpoint": checkpoint,
        "signal": signal.Signals(number).name,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "job": job,
    }
    fresh = folder / f".{MARKER}"
    fresh.write_text(json.dumps(said, indent=1) + "\n")
    fresh.replace(folder / MARKER)
    return said


def read_marker(folder: Path) -> dict[str, Any] | None:
    """What RUN/PREEMPTED says, None without one; ValueError when it is damaged."""
    try:
        return json.loads((folder / MARKER).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / MARKER} cannot be read: {error}") from error


def clear_marker(folder: Path) -> None:
    """A run that goes on is no preempted one any more."""
    with suppress(FileNotFoundError):
        (folder / MARKER).unlink()


def in_words(marker: dict[str, Any], folder: Path) -> str:
    """One line for people: what was saved and how to go on."""
    saved = f"checkpoint {marker['checkpoint']}" if marker["checkpoint"] else "nothing to save yet"
    return f"preempted by {marker['signal']} at step {marker['step']} ({saved}); go on with run.dir={folder}"
