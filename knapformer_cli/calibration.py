"""A workload model as measured: the file that `knapformer calibrate` writes and that planning reads."""

import json
import math
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from knapformer import WorkloadModel
from knapformer_cli.schema import Config


@dataclass(frozen=True)
class Calibration:
    """What was measured on which device for which model, and what came of it; seconds are of one rank."""

    device: str
    subject: dict[str, Any]
    """The model and how it computes, flat: see `subject_of`."""
    kernel: str
    """The attention backend that balancer.kernel chose."""
    cost: WorkloadModel
    """Seconds of forward and backward, without traffic."""
    overhead: float
    """Seconds that every step costs besides."""
    gamma: float
    """The gamma of the paper's form with the same ratio of both terms."""
    held_out_error: float
    """Median relative error of steps that were not fitted."""
    gamma_error: float
    """The same of the paper's form with balancer.gamma, scaled as well as it can be."""
    longest: int
    """Tokens of the longest sequence measured."""
    date: str
    torch: str

    def __post_init__(self) -> None:
        for name in ("overhead", "gamma", "held_out_error", "gamma_error", "longest"):
            value = getattr(self, name)
            _check_number(name, value)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}; it must be a finite number of at least 0")

    def save(self, path: Path, measured: list[dict[str, Any]]) -> None:
        """Write it as JSON, with the measurements that it was fitted to for whoever wants to look."""
        path.write_text(json.dumps({**asdict(self), "measured": measured}, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Read what `save` wrote; ValueError names a file that is missing or holds anything else."""
        try:
            values = json.loads(path.read_text())
            if not isinstance(values, dict) or not isinstance(values.get("cost"), dict):
                raise ValueError("it has no coefficients under cost")
            kept = {field.name: values[field.name] for field in fields(cls)}
            if not isinstance(kept["subject"], dict):
                raise ValueError("subject is no table")
            for name, value in values["cost"].items():
                _check_number(f"cost.{name}", value)
            return cls(**{**kept, "cost": WorkloadModel(**values["cost"])})
        except OSError as error:
            raise ValueError(f"calibration {path} cannot be read: {error.strerror}") from error
        except KeyError as error:
            raise ValueError(f"{path} is no calibration: {error} is missing") from error
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path} is no calibration: {error}") from error

    def difference(self, subject: dict[str, Any]) -> str | None:
        """The first setting that differs, in words; None where the calibration is of this very model."""
        for key in sorted(self.subject.keys() | subject.keys()):
            ours, theirs = subject.get(key), self.subject.get(key)
            if ours != theirs:
                return f"{key}={theirs}, not {ours}"
        return None


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, float | int):
        raise ValueError(f"{name} is {value!r}, no number")


def subject_of(config: Config, dtype: str) -> dict[str, Any]:
    """What decides the seconds of config.model besides the device, as one flat table."""

    def walk(values: dict[str, Any], prefix: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in values.items():
            name = f"{prefix}.{key}"
            flat |= walk(value, name) if isinstance(value, dict) else {name: value}
        return flat

    return {
        **walk(asdict(config.model), "model"),
        "data channels": config.data.channels,
        "parallel.dtype": dtype,
        "parallel.activation_checkpointing": config.parallel.activation_checkpointing,
        "parallel.compile": config.parallel.compile,
        "balancer.kernel": config.balancer.kernel,
    }


def device_name(device: str, threads: int) -> str:
    """What a calibration is bound to: the GPU's name, or the processor's and the threads of a rank.

    A process of its own asks for the GPU's: in this one, a launcher's, its context would stay.
    """
    if device == "cuda":
        ask = "import torch; print(torch.cuda.get_device_name())"
        return subprocess.run(
            [sys.executable, "-c", ask], capture_output=True, text=True, check=True
        ).stdout.strip()
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(), re.MULTILINE) if info.exists() else None
    return f"cpu {found[1] if found else platform.machine()}, {threads} thread{'s' * (threads > 1)}"


def file_name(device: str, subject: dict[str, Any]) -> str:
    """DEVICE-MODEL.json; what the name leaves out is compared when the file is read."""
    arch = subject["model.arch"]
    blocks = ("blocks",) if arch == "dit" else ("double_blocks", "single_blocks")
    sizes = "+".join(str(subject[f"model.{name}"]) for name in blocks)
    checkpointed = "-recomputed" if subject["parallel.activation_checkpointing"] else ""
    name = f"{device}-{arch}-{subject['model.width']}x{sizes}-{subject['parallel.dtype']}{checkpointed}"
    return re.sub(r"[^a-z0-9+]+", "-", name.lower()) + ".json"


def find_calibration(
    folder: Path, subject: dict[str, Any], on: Callable[[str], bool]
) -> tuple[Path, Calibration] | None:
    """The calibration of `subject` on a device that `on` accepts, if any; ValueError for a damaged one."""
    named = file_name("*", subject)
    for path in sorted(folder.glob(f"*{named.removeprefix('-')}")):
        calibration = Calibration.load(path)
        if calibration.difference(subject) is None and on(calibration.device):
            return path, calibration
    return None
