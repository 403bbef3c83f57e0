"""A small run of the main job: the digits recipe, cut down until a step takes a fraction of a second."""

from pathlib import Path

import pytest

from data.demo import make_demo

SMALL = [
    "training.batch_tokens=900",
    "model.single_blocks=1",
    "model.width=32",
    "model.heads=4",
    "model.rope_axes=[2,2,4]",
    "model.text.width=32",
    "model.text.layers=1",
    "scheduler.warmup=5",
    "scheduler.steps=20",
    "sampling.every=0",
    "sampling.rows=1",
    "sampling.steps=2",
    "sampling.prompts=[a two]",
    "checkpoint.every=0",
    "data.workers=0",
    "logging.wandb=disabled",
    "launch.device=cpu",
]


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo set, once for all tests."""
    folder = tmp_path_factory.mktemp("demo") / "digits"
    make_demo(folder)
    return folder


@pytest.fixture(scope="session")
def small(demo: Path) -> list[str]:
    """Overrides of the small run, all but run.dir and steps."""
    return [
        *SMALL,
        "data.demo=''",
        f"data.sources.pictures.shards={demo}/pictures-{{000000..000002}}.tar",
        f"data.sources.clips.shards={demo}/clips-{{000000..000001}}.tar",
    ]
