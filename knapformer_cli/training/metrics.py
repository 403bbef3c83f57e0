"""Where the numbers of a run go: metrics.jsonl always, wandb from rank 0, a progress bar for people."""

import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from knapformer_cli.schema import Config
from knapformer_cli.training.batch import GlobalBatch

MOST_LENGTHS = 64 * 2**20  # bytes of lengths.jsonl: a profile needs some steps, not all of a long run


class Metrics:
    """Writes one line a logged step, on rank 0; a failure of wandb is said once and never stops training."""

    def __init__(self, folder: Path, config: Config, wandb_id: str, start: int):
        """`start` is the number of steps done; what a killed run logged beyond it is dropped."""
        self.console = Console(stderr=True)
        self.path, lengths = folder / "metrics.jsonl", folder / "lengths.jsonl"
        _forget_after(self.path, start)
        if lengths.exists():
            _forget_after(lengths, start)
        self.file = self.path.open("a", buffering=1)
        self.lengths_file = lengths.open("a", buffering=1) if config.logging.lengths else None
        self.wandb = self._start_wandb(folder, config, wandb_id)
        # Narrow enough for 80 columns: step, total and remaining time come before the numbers.
        columns = (BarColumn(bar_width=10), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, TextColumn("{task.fields[numbers]}"), console=self.console)
        self.task = self.progress.add_task(
            "training", total=config.training.steps, completed=start, numbers=""
        )

    def __enter__(self) -> "Metrics":
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()
        self.file.close()
        if self.lengths_file is not None:
            self.lengths_file.close()
        if self.wandb is not None:
            self._guard(lambda: self.wandb.finish(exit_code=0 if kind is None else 1))

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Record the numbers of optimizer step `step` (from 1)."""
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.progress.update(self.task, completed=step, numbers=_summary(values))
        if self.wandb is not None:
            known = {name: value for name, value in values.items() if isinstance(value, (int, float))}
            self._guard(lambda: self.wandb.log(known, step=step))
        if not self.console.is_terminal and (step == 1 or step % 20 == 0):
            self.console.print(f"step {step}: {_summary(values)}", highlight=False)

    def log_lengths(self, step: int, batch: GlobalBatch, sources: Sequence[str], ranks: int) -> None:
        """Record the tokens and the source of each sequence of the step, rank after rank."""
        if self.lengths_file is None:
            return
        row = {
            "step": step,
            "sources": list(sources),
            "per_rank": np.bincount(batch.home_S, minlength=ranks).tolist(),
            "length": batch.len_S.tolist(),
            "source": batch.source_S.tolist(),
        }
        self.lengths_file.write(json.dumps(row, separators=(",", ":")) + "\n")
        if self.lengths_file.tell() > MOST_LENGTHS:
            self.say(f"lengths.jsonl is full: lengths after step {step} are not logged")
            self.lengths_file.close()
            self.lengths_file = None

    def busy_with(self, what: str) -> None:
        """Say in the bar what keeps the next step waiting."""
        self.progress.update(self.task, numbers=what, refresh=True)

    def pictures(self, step: int, paths: list[Path]) -> None:
        """Show sample pictures and clips beside the curves."""
        if self.wandb is not None:
            import wandb

            images = {
                path.stem.split("-")[-1]: wandb.Image(str(path)) for path in paths if path.suffix == ".png"
            }
            self._guard(lambda: self.wandb.log(images, step=step))

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _start_wandb(self, folder: Path, config: Config, wandb_id: str) -> Any:
        logging = config.logging
        if logging.wandb == "disabled":
            return None
        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            import wandb

            online = logging.wandb == "online" and wandb.login(prompt=False)
            if logging.wandb == "online" and not online:
                self.say("wandb has no key, so this run is logged offline; `wandb sync` uploads it later")
            return wandb.init(
                project=logging.project,
                group=logging.group,
                name=folder.name,
                id=wandb_id,
                resume="allow",
                mode="online" if online else "offline",
                dir=folder,
                config=asdict(config),
            )
        except Exception as error:  # whatever wandb meets, training goes on
            self.say(f"wandb is off for this run: {error}")
            return None

    def _guard(self, send: Any) -> None:
        try:
            send()
        except Exception as error:
            self.say(f"wandb is off from here on: {error}")
            self.wandb = None


def wandb_id(folder: Path) -> str:
    """The id of a run that begins in this folder: the same again when it ends before its first checkpoint."""
    path = folder / ".wandb_id"
    if not path.exists():
        path.write_text(uuid.uuid4().hex[:8])
    return path.read_text()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The logged steps of a run, oldest first; what a kill left of a line is passed over."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and "step" in row:
            rows.append(row)
    return rows


def _forget_after(path: Path, step: int) -> None:
    """Drop what a killed run logged beyond the checkpoint that goes on: those steps happen again."""
    kept = [row for row in read_metrics(path) if row["step"] <= step]
    fresh = path.with_suffix(".partial")
    fresh.write_text("".join(json.dumps(row) + "\n" for row in kept))
    fresh.replace(path)


def _summary(v: dict[str, Any]) -> str:
    return (
        f"loss {v['loss']:.3f} {v['tokens_per_second']:,.0f} tokens/s "
        f"imbalance {v['work_max_over_mean_before']:.2f} -> {v['work_max_over_mean_after']:.2f}"
    )
