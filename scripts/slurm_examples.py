"""Writes the batch scripts beside it, with the code that `knapformer slurm` writes its own with.

    python scripts/slurm_examples.py

Each is called from the checkout: `sbatch scripts/single_node.slurm`. Change what they ask for to what your
cluster has, or let `knapformer slurm train --submit` write a script for your settings.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from knapformer_cli.schema import SlurmConfig
from knapformer_cli.slurm.script import Job, profile_script, training_script

HERE = Path(__file__).parent
RECIPE = (
    "experiment=none",
    "model=base",
    "data=shards",
    "data.sources.all.shards=/data/shards-{000000..000099}.tar",
)


def examples() -> Iterator[tuple[str, str]]:
    """File names and texts."""
    yield "single_node.slurm", training_script(job("single_node", 1, settings=RECIPE))
    yield "multi_node.slurm", training_script(job("multi_node", 4, settings=RECIPE))
    spot = SlurmConfig(time="4:00:00", grace=600, requeues=100, partition="preemptible", cpus=96)
    yield "preemptible.slurm", training_script(job("preemptible", 2, spot, settings=RECIPE))
    rates = ("optimizer.lr=1e-4", "optimizer.lr=2e-4", "optimizer.lr=4e-4", "optimizer.lr=8e-4")
    sweep = job("array_sweep", 1, settings=(*RECIPE, "logging.group=rates"), array="0-3%2", sweep=rates)
    yield "array_sweep.slurm", training_script(sweep)
    one = SlurmConfig(gpus_per_node=1, cpus=12, time="1:00:00")
    joint = ("experiment=none", "model=flux", "parallel=fsdp_checkpointed", "data=paper_joint")
    yield "profile.slurm", profile_script(job("profile", 1, one, settings=joint))


def job(name: str, nodes: int, ask: SlurmConfig | None = None, **more: Any) -> Job:
    """A job of the checkout that sbatch is called from: its code, its .venv, runs/NAME."""
    ask = ask or SlurmConfig(cpus=96)
    return Job(name, Path("runs") / name, Path("."), ".venv/bin/python", nodes, ask, **more)


if __name__ == "__main__":
    for name, text in examples():
        (HERE / name).write_text(text)
