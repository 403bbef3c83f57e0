"""What is wrong with a machine, or with the nodes of a job, is said before training, with what to do."""

import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from knapformer_cli import checks
from knapformer_cli.bandwidth import Bandwidth, measure
from knapformer_cli.config import compose
from knapformer_cli.doctor import doctor_command
from knapformer_cli.launch import write_run_folder
from knapformer_cli.schema import ClusterConfig, Config
from knapformer_cli.training.parallel import SharedError, World
from knapformer_cli.training.preflight import Facts, find_fault, find_slow, preflight
from tests.spawn import spawn

SOUND = Facts({"the code": "a", "RUN/config.yaml": "b"}, (), clock=100.0, pace=0.001)


def doctor(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "knapformer_cli", "doctor", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_doctor_shows_every_check_and_its_exit_code_says_whether_there_is_something_to_mend(
    tmp_path: Path, small: list[str]
) -> None:
    done = doctor(*small, f"run.dir={tmp_path}/run")
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("python", "packages", "gpus", "run folder", "clock", "shards", "open files", "ranks talk"):
        assert name in done.stdout
    assert done.stdout.rstrip().endswith("ready")
    missing = f"data.sources.pictures.shards={tmp_path}/none.tar"
    done = doctor(*small, missing, "run.dir=/proc/nowhere/run")
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"shards: mount or copy {tmp_path}/none.tar" in done.stdout
    assert "run folder: choose a folder that you may write" in done.stdout
    assert done.stdout.rstrip().endswith("2 to mend")


def test_lengths_without_pixels_are_no_shards(small: list[str]) -> None:
    assert "training needs data.sources" in checks.shards(compose([*small, "data=paper_joint"])).fix


def test_doctor_refuses_what_is_no_setting() -> None:
    with pytest.raises(ValueError, match="is no key of the configuration"):
        doctor_command(["launch.devise=cpu"])


def test_a_full_disk_a_busy_port_and_a_low_limit_are_found_with_their_fix(tmp_path: Path) -> None:
    assert not checks.disk("run folder", tmp_path / "run", 2**20).fix
    assert "free " in checks.disk("run folder", tmp_path / "run", 2**60).fix
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        assert "choose another launch.port" in checks.port(busy.getsockname()[1]).fix
    assert not checks.port(0).fix
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1500, hard))
        assert not checks.open_files(ranks=8).fix
        assert checks.open_files(ranks=1024).fix == "ulimit -n 65536"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert checks.gpus_visible("cuda").fix or torch.cuda.is_available()


def test_the_first_fault_is_told_with_rank_and_node() -> None:
    hosts = ("n0", "n1")
    assert find_fault([SOUND, SOUND], hosts) is None
    broken = replace(SOUND, faults=("GPU 3 is in use by another process",))
    assert find_fault([SOUND, broken], hosts) == "rank 1 on n1: GPU 3 is in use by another process"
    other = replace(SOUND, alike={**SOUND.alike, "RUN/config.yaml": "none"})
    assert (
        find_fault([SOUND, other], hosts) == "RUN/config.yaml differs: none on n1 (rank 1), b on n0 (rank 0)"
    )
    late = replace(SOUND, clock=160.0)
    said = find_fault([SOUND, SOUND, late], (*hosts, "n2"))
    assert said is not None
    assert said.startswith("the clock of n2 (rank 2) is 60 s from the others")


def test_a_network_far_below_the_cluster_is_told_with_both_numbers() -> None:
    cluster = ClusterConfig(bandwidth=200.0, bandwidth_across=50.0)
    assert find_slow(Bandwidth(40.0, 30.0), cluster, ("n0", "n1")) is None
    said = find_slow(Bandwidth(40.0, 3.0), cluster, ("n0", "n1"))
    assert said is not None
    assert "all-to-all 3.0 GB/s" in said
    assert "cluster.bandwidth_across=50" in said
    assert "cluster.bandwidth=200" in (find_slow(Bandwidth(40.0, 30.0), cluster, ("n0", "n0")) or "")


def world_of(group: dist.ProcessGroup, hosts: tuple[str, ...]) -> World:
    cpu_group, ahead_group = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    device = torch.device("cpu")
    return World(group.rank(), group.size(), device, group, cpu_group, ahead_group, hosts)


def sound_nodes_pass_and_a_fault_of_one_is_raised_on_all(
    group: dist.ProcessGroup, config: Config, missing: Config
) -> None:
    world = world_of(group, ("n0", "n1"))
    said = preflight(config, world)
    assert said.startswith("preflight: 2 ranks on 2 node(s); all-reduce ")
    assert measure(group, world.device).all_to_all > 0
    with pytest.raises(SharedError, match=r"rank 0 on n0: the shard .*none\.tar cannot be reached"):
        preflight(missing, world)


def test_preflight_on_real_ranks(tmp_path: Path, small: list[str]) -> None:
    words = [*small, f"run.dir={tmp_path}/run"]
    config = compose(words)
    write_run_folder(config)
    missing = compose([*words, f"data.sources.pictures.shards={tmp_path}/none.tar"])
    spawn([sound_nodes_pass_and_a_fault_of_one_is_raised_on_all], 2, config, missing)
