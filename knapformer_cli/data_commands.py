"""`knapformer data ...`."""

from pathlib import Path

from data.demo import make_demo


def demo_command(out: Path, seed: int) -> None:
    """Write the demo set and say what was written."""
    for path in make_demo(out, seed):
        print(f"{path}  {path.stat().st_size / 1e6:.2f} MB")
