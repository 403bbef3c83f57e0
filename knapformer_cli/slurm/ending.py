"""Why a job ended: `python -m knapformer_cli.slurm.ending RUN finished|preempted|stopped|failed REMARK`.

The batch script asks at its end, perhaps with the system's Python: standard library only.
"""

import json
import sys
from pathlib import Path
from typing import Any

from knapformer_cli.failures import read_failures


def ending(run: Path, how: str, remark: str) -> str:
    """One sentence for the log, and below it the last lines of the rank that failed first."""
    step = last_step(run)
    said = " ".join(
        filter(None, [how, remark, "before the first step" if step is None else f"at step {step}"])
    )
    saved = newest_checkpoint(run)
    if how == "failed":
        failures = read_failures(run)
        said += f": {failures[0].in_words()}" if failures else ""
    elif how != "finished":
        said += f" (checkpoint {saved})" if saved else " (no checkpoint)"
    return said


def last_step(run: Path) -> int | None:
    """The newest step that the run logged, read from the end of its metrics."""
    path = run / "metrics.jsonl"
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - (1 << 16)))
        for line in reversed(file.read().splitlines()):
            try:
                row: Any = json.loads(line)
            except ValueError:  # the line being written, or the first one, cut
                continue
            if isinstance(row, dict) and "step" in row:
                return int(row["step"])
    return None


def newest_checkpoint(run: Path) -> str | None:
    """The name of the newest complete checkpoint."""
    return max((path.parent.name for path in (run / "checkpoints").glob("[0-9]*/COMPLETE")), default=None)


if __name__ == "__main__":
    print(ending(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
