"""The laws of training, on real gloo ranks: the same losses whatever the layout, ranks and interruptions."""

from pathlib import Path

import pytest
import torch.distributed as dist

from knapformer_cli.config import compose
from knapformer_cli.launch import write_run_folder
from knapformer_cli.training.metrics import read_metrics
from knapformer_cli.training.parallel import World
from knapformer_cli.training.trainer import train
from tests.data.media import pairs, picture, tar
from tests.spawn import spawn

STEPS = 20
LAYOUTS = {
    1: {"none": [], "elastic": ["balancer.layout=elastic"]},
    2: {
        "none": ["balancer.layout=none"],
        "g1n2": ["balancer.layout=g1n2"],
        "g2n1": ["balancer.layout=g2n1"],
        "elastic": ["balancer.layout=elastic"],
        "another cost": ["balancer.layout=elastic", "balancer.cost=cluster"],
        "capped": ["balancer.layout=elastic", "training.max_tokens_per_rank=300"],
        "recomputed": ["balancer.layout=g2n1", "parallel.activation_checkpointing=true"],
    },
    4: {"g1n2+g2n1": ["balancer.layout=g1n2+g2n1"], "replicas": ["balancer.layout=g2n1"]},
}


def train_here(group: dist.ProcessGroup, overrides: list[str]) -> None:
    """One run on the ranks of the test's own group."""
    import torch

    config = compose([*overrides, f"launch.ranks={group.size()}"])
    if group.rank() == 0:
        write_run_folder(config)
    cpu_group, ahead_group = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    train(config, World(group.rank(), group.size(), torch.device("cpu"), group, cpu_group, ahead_group))


def train_all(group: dist.ProcessGroup, runs: list[list[str]]) -> None:
    for overrides in runs:
        train_here(group, overrides)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def test_any_layout_and_any_number_of_ranks_log_the_same_losses(tmp_path: Path, small: list[str]) -> None:
    for ranks, layouts in LAYOUTS.items():
        runs = [
            [*small, *extra, f"training.steps={STEPS}", f"run.dir={tmp_path}/{ranks}-{name}"]
            for name, extra in layouts.items()
        ]
        spawn([train_all], ranks, runs)
    reference = losses(tmp_path / "1-none")
    assert len(reference) == STEPS
    assert reference[-1] < reference[0]
    for ranks, layouts in LAYOUTS.items():
        for name in layouts:
            assert losses(tmp_path / f"{ranks}-{name}") == pytest.approx(reference, rel=1e-5), (ranks, name)
    capped = read_metrics(tmp_path / "2-capped" / "metrics.jsonl")
    assert max(row["micro_steps"] for row in capped) > 1
    assert max(row["peak_tokens"] for row in capped) <= 300
    split = read_metrics(tmp_path / "2-g2n1" / "metrics.jsonl")
    assert min(row["attention_sent"] for row in split) == pytest.approx(0.5)


def test_a_run_resumed_on_other_ranks_logs_the_rest_of_the_same_curve(
    tmp_path: Path, small: list[str]
) -> None:
    whole = [*small, "training.steps=8", f"run.dir={tmp_path}/whole"]
    begun = [*small, "training.steps=4", f"run.dir={tmp_path}/resumed"]
    spawn([train_all], 2, [whole, begun])
    spawn([train_all], 1, [[*small, "training.steps=6", f"run.dir={tmp_path}/resumed"]])
    spawn([train_all], 3, [[*small, "training.steps=8", f"run.dir={tmp_path}/resumed"]])
    assert losses(tmp_path / "resumed") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)


def test_a_lost_sample_is_told_once_by_its_key_and_counted(tmp_path: Path, small: list[str], capfd) -> None:
    half = picture(32, 32)[:-30]  # its header says what it is, and its pixels end early
    shard = tar(tmp_path / "a.tar", [*pairs(8), ("broken.png", half), ("broken.txt", b"half a picture")])
    words = [f"data.sources.pictures.shards={shard}", "data.sources.pictures.exhausted=stop"]
    words += ["data.sources.clips.weight=0", "training.batch_tokens=300", f"run.dir={tmp_path}/run"]
    spawn([train_all], 2, [[*small, *words]])
    assert capfd.readouterr().err.count("broken") == 1
    assert sum(row["lost_samples"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1
