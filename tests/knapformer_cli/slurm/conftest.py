"""Jobs on a real two-node Slurm, started once for all tests."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knapformer_cli.slurm.app import slurm_app
from tests.knapformer_cli.slurm.cluster import Cluster, missing, start

STEPS = 40


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Two idle nodes; skipped without Slurm or root, unless REQUIRE_SLURM says that both must be there."""
    if reason := missing():
        if os.environ.get("REQUIRE_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)
    with tempfile.TemporaryDirectory(
        prefix="slurm-"
    ) as folder:  # a short path: sockets have a limit of theirs
        running = start(Path(folder))
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = running.environment["SLURM_CONF"]
        try:
            yield running
        finally:
            running.stop()
            os.environ.pop("SLURM_CONF")
            if before is not None:
                os.environ["SLURM_CONF"] = before


@pytest.fixture(scope="session")
def job(small: list[str]) -> list[str]:
    """Overrides and options of a small job on both nodes, a rank each; all but run.dir."""
    of_the_run = [
        f"training.steps={STEPS}",
        f"scheduler.steps={STEPS}",
        "launch.ranks=1",
        "launch.timeout=60",
    ]
    return [*small, *of_the_run, "--nodes=2", "--gpus-per-node=0", "--time=10"]


def knapformer(*words: str) -> tuple[int, str, str]:
    """What `knapformer slurm WORDS` does: exit code, output, error."""
    done = CliRunner().invoke(slurm_app, words)
    if isinstance(done.exception, ValueError):  # as `main` tells it
        return 2, done.output, str(done.exception)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output, done.stderr


def submit(run: Path, *words: str) -> str:
    """Submit a job into the run folder and return its number."""
    code, _, said = knapformer("train", *words, f"run.dir={run}", "--submit")
    assert code == 0, said
    return (run / "JOB").read_text().strip()


def log(run: Path) -> str:
    """All that the jobs of a run said."""
    return "".join(path.read_text(errors="replace") for path in sorted(run.glob("logs/slurm-*.out")))


def processes(number: str, of: str = "") -> list[int]:
    """Every living process of a job whose command line holds the words."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environment = (place / "environ").read_bytes().split(b"\0")
            ours = f"SLURM_JOB_ID={number}".encode() in environment
            if ours and of.encode() in (place / "cmdline").read_bytes():
                found.append(int(place.name))
        except OSError:  # it ended meanwhile
            continue
    return found
