"""Checkpoints: sharded by torch.distributed.checkpoint, complete or not there at all.

    checkpoints/0000000100/   .metadata and *.distcp, state.json, config.yaml, COMPLETE

A save writes to a temporary name, adds the marker (every file's size) and is renamed last; readers accept
only folders that hold what their marker says.
"""

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from knapformer_cli.training.parallel import SharedError, agree

MARKER = "COMPLETE"
_WRAPPER = "_checkpoint_wrapped_module."  # in parameter names under activation checkpointing


@dataclass(frozen=True)
class Progress:
    """What a checkpoint says besides tensors: small, and the same on every rank."""

    step: int  # optimizer steps done
    samples: int
    tokens: int
    loader: dict[str, Any] | None  # None is the beginning
    wandb_id: str


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in a run's `checkpoints` folder, oldest first."""
    return sorted(path.parent for path in folder.glob(f"[0-9]*/{MARKER}"))


def find_checkpoint(resume: str, folder: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` means: auto is the newest complete one, none is None.

    Raises ValueError for a path without a complete checkpoint.
    """
    if resume == "none":
        return None
    if resume == "auto":
        found = complete_checkpoints(folder)
        try:
            return check_complete(found[-1]) if found else None
        except ValueError as error:
            raise ValueError(f"{error}; remove it to go on from the one before, or name another") from error
    return check_complete(Path(resume))


def check_complete(path: Path) -> Path:
    """`path`, or the newest complete checkpoint where it is a run folder; ValueError where there is none."""
    newest = complete_checkpoints(path / "checkpoints")
    if newest:
        return check_complete(newest[-1])
    if not path.is_dir():
        state = "is no folder" if path.exists() else "does not exist"
        raise ValueError(f"{path} {state}; name a checkpoint folder or a run folder")
    if (path / "config.yaml").is_file() and not (path / "state.json").exists():
        raise ValueError(f"{path} is a run folder without a complete checkpoint")
    if not (path / MARKER).is_file():
        raise ValueError(f"{path} is no complete checkpoint: {MARKER} is missing, so its save never ended")
    try:
        size_of = json.loads((path / MARKER).read_text())
    except ValueError as error:
        raise ValueError(f"{path / MARKER} is damaged: {error}") from error
    if not isinstance(size_of, dict):
        raise ValueError(f"{path / MARKER} is damaged: it holds no sizes by file name")
    for name, size in size_of.items():
        found = (path / name).stat().st_size if (path / name).is_file() else None
        if found != size:
            state = "missing" if found is None else f"{found} bytes long, not {size}"
            raise ValueError(f"{path} is no complete checkpoint: {name} is {state}")
    return path


def read_progress(path: Path) -> Progress:
    try:
        return Progress(**json.loads((path / "state.json").read_text()))
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"{path / 'state.json'} is damaged: {error}") from error


def save(
    folder: Path,
    progress: Progress,
    config_yaml: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    average: dict[str, Tensor],
    keep: int,
    group: dist.ProcessGroup,
) -> Path:
    """Write a checkpoint of all ranks into `folder` (collective) and drop all but the newest `keep`."""
    final = folder / f"{progress.step:010d}"
    partial = folder / f".partial-{final.name}"
    first = dist.get_rank() == 0
    agree(lambda: _begin(partial) if first else None, group)
    with _in_words(f"checkpoint {final} cannot be written"):
        dcp.save(_tensors(model, optimizer, average), checkpoint_id=partial)
    agree(lambda: _finish(partial, final, progress, config_yaml, keep) if first else None, group)
    return final


def _begin(partial: Path) -> None:
    for old in partial.parent.glob(".partial-*"):  # saves that never ended
        shutil.rmtree(old)
    partial.mkdir(parents=True)


def _finish(partial: Path, final: Path, progress: Progress, config_yaml: str, keep: int) -> None:
    """On rank 0, after all ranks wrote: complete the checkpoint, give it its name, drop old ones."""
    stored = FileSystemReader(partial).read_metadata().storage_data or {}
    for name in {info.relative_path for info in stored.values()}:
        if not (partial / name).is_file():
            raise ValueError(
                f"{partial} lacks {name}, which another rank wrote; run.dir must be shared by all nodes"
            )
    (partial / "config.yaml").write_text(config_yaml)
    (partial / "state.json").write_text(json.dumps(asdict(progress)))
    sizes = {file.name: file.stat().st_size for file in sorted(partial.iterdir())}
    (partial / MARKER).write_text(json.dumps(sizes, indent=1))
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    for old in complete_checkpoints(final.parent)[:-keep] if keep else []:
        (old / MARKER).unlink()  # from here on it is no checkpoint, however far the removal gets
        shutil.rmtree(old)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]) -> None:
    """Fill model, optimizer and averaged weights in place (collective), however many ranks saved them."""
    state = _tensors(model, optimizer, average)
    with _in_words(f"checkpoint {path} cannot be read"):
        dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(strict=True),
    )


def load_average(path: Path, model: nn.Module) -> None:
    """Fill an unsharded model with a checkpoint's averaged weights, in one process without a group."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    with _in_words(f"checkpoint {path} cannot be read"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as it is meant here
        dcp.load({"average": weights}, checkpoint_id=path, no_dist=True)


@contextmanager
def _in_words(what: str) -> Iterator[None]:
    """Turn what torch.distributed.checkpoint raises on every rank into a sentence with one rank's reason."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = min(error.failures.items())
        raise SharedError(f"{what}: rank {rank} met {type(reason).__name__}: {reason}") from error
    except Exception as error:  # damaged metadata fails with whatever its unpickling meets
        raise ValueError(f"{what}: {type(error).__name__}: {error}") from error


def _tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, average: dict[str, Tensor]
) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    averages = {name.replace(_WRAPPER, ""): weight for name, weight in average.items()}
    return {"model": model_state, "optimizer": optimizer_state, "average": averages}
