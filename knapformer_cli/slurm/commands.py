"""Slurm's own commands, and what they refuse in one sentence."""

import re
import shutil
import subprocess


def check_installed(command: str) -> None:
    """Raise ValueError when there is no Slurm on this machine."""
    if shutil.which(command) is None:
        raise ValueError(
            f"{command} is not on this machine's PATH; run this where Slurm's commands are, on a login node"
        )


def slurm(command: str, *words: str, seconds: float = 60) -> str:
    """What the command printed; ValueError with Slurm's own reason where it failed or did not answer."""
    check_installed(command)
    try:
        done = subprocess.run([command, *words], capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"Slurm did not answer {command} within {seconds:.0f} seconds") from error
    if done.returncode:
        raise ValueError(f"Slurm refused {command}: {_reason(done.stderr) or f'exit code {done.returncode}'}")
    return done.stdout


def _reason(stderr: str) -> str:
    """`sbatch: error: a` and `sbatch: error: b` as `a; b`."""
    lines = [re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in stderr.splitlines()]
    return "; ".join(filter(None, lines))
