"""The batch scripts beside the benchmarks: the code that the command line writes, and sound shell."""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
SHELL = sorted([*SCRIPTS.glob("*.slurm"), *SCRIPTS.glob("*.sh")])


def test_the_examples_are_what_the_command_line_writes() -> None:
    texts = dict(runpy.run_path(str(SCRIPTS / "slurm_examples.py"))["examples"]())
    assert {path.name for path in SCRIPTS.glob("*.slurm")} == set(texts)
    for name, text in texts.items():
        assert (SCRIPTS / name).read_text() == text, f"python scripts/slurm_examples.py writes another {name}"


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_every_shell_script_is_sound(path: Path) -> None:
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck") is None and not os.environ.get("REQUIRE_SLURM"):
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
