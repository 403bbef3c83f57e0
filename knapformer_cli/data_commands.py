"""`knapformer data ...`."""

from pathlib import Path

from data.demo import make_demo


def demo_command(out: Path, seed: int) -> None:
    """Write the demo set and say what was written."""
    if seed < 0:
        raise ValueError(f"--seed is {seed}; it must be at least 0")
    if out.exists():
        raise ValueError(f"--out {out} exists already; remove it or choose another folder")
    try:
        written = make_demo(out, seed)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written: {error.strerror}") from error
    for path in written:
        print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
