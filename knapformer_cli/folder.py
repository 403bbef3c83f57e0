"""A run folder belongs to one job at a time."""

import fcntl
import os
from pathlib import Path
from typing import TextIO

from knapformer_cli.config import to_yaml
from knapformer_cli.schema import Config

HELD = "KNAPFORMER_HOLDS"  # the folder that a launcher holds for its workers


def write_run_folder(config: Config) -> Path:
    """Create RUN with its config.yaml; ValueError where that cannot be written, or another job is in it."""
    folder = Path(config.run.dir)
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
        hold_run_folder(folder)
        fresh = folder / ".config.yaml"
        fresh.write_text(to_yaml(config))
        fresh.replace(folder / "config.yaml")
    except OSError as error:
        raise ValueError(f"run.dir {folder} cannot be written: {error.strerror}") from error
    return folder / "config.yaml"


def hold_run_folder(folder: Path) -> None:
    """Keep other jobs out of RUN until this process ends; ValueError when one is in it.

    Once a job: by the launcher that wrote the folder, else by rank 0, wherever it runs.
    """
    name = str(folder.resolve())
    if os.environ.get(HELD) == name or name in _held:
        return
    try:
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise ValueError(f"run.dir {folder} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(
            f"run.dir {folder} is in use by another job; wait for it or choose another"
        ) from error
    except OSError:  # a file system without locks
        return
    _held[name] = lock


def let_go_of_run_folder(folder: Path) -> None:
    """Leave RUN to a job that starts elsewhere."""
    if lock := _held.pop(str(folder.resolve()), None):
        lock.close()


_held: dict[str, TextIO] = {}  # an open file is a held lock
