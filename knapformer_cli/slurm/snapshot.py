"""The code of a job: the packages as they are at submission, copied into the run folder."""

import hashlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("knapformer", "knapformer_cli", "models", "data", "conf")
RECORD, CHANGES = "SNAPSHOT.json", "uncommitted.diff"


@dataclass(frozen=True)
class Snapshot:
    """Where submitted code came from; of an installed wheel there is no commit."""

    digest: str  # of all files, names and contents
    version: str
    source: str
    commit: str | None
    changed: tuple[str, ...]  # files that differ from the commit, or are new
    time: str

    def in_words(self) -> str:
        """One line for people."""
        if self.commit is None:
            return f"version {self.version}, {self.digest}"
        changed = f" with {len(self.changed)} files changed" if self.changed else ""
        return f"commit {self.commit[:10]}{changed}, {self.digest}"


def take_snapshot(folder: Path) -> Path:
    """Copy the packages that run here to folder/DIGEST and return that path; the same code is copied once.

    A job that waits keeps its code, whatever is submitted into the run folder meanwhile. Raises OSError.
    """
    root = Path(__file__).resolve().parents[2]
    content = {str(path.relative_to(root)): path.read_bytes() for path in _sources(root)}
    digest = hashlib.sha256()
    for name, data in sorted(content.items()):
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    final = folder / digest.hexdigest()[:12]
    if final.exists():
        return final
    partial = folder / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    for name, data in content.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).write_bytes(data)
    commit, changed, diff = _git(root)
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    about = Snapshot(final.name, version("knapformer"), str(root), commit, changed, now)
    (partial / RECORD).write_text(json.dumps(asdict(about), indent=1) + "\n")
    if diff:
        (partial / CHANGES).write_bytes(diff)
    partial.rename(final)
    return final


def read_snapshot(code: Path) -> Snapshot:
    """What was written beside the code."""
    record = json.loads((code / RECORD).read_text())
    return Snapshot(**{**record, "changed": tuple(record["changed"])})


def _sources(root: Path) -> Iterator[Path]:
    for package in PACKAGES:
        for path in (root / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def _git(root: Path) -> tuple[str | None, tuple[str, ...], bytes]:
    """Commit, changed files and their diff; no commit where the packages are no git checkout of their own."""
    top = _run(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top.decode().strip()) != root:
        return None, (), b""
    commit = _run(root, "rev-parse", "HEAD")
    status = _run(root, "status", "--porcelain", "--", *PACKAGES) or b""
    diff = _run(root, "diff", "--binary", "HEAD", "--", *PACKAGES) or b""
    changed = tuple(line[3:] for line in status.decode(errors="replace").splitlines())
    return commit.decode().strip() if commit else None, changed, diff


def _run(root: Path, *words: str) -> bytes | None:
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout if done.returncode == 0 else None
