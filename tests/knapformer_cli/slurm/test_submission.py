"""What `knapformer slurm train` writes and refuses; none of it needs a Slurm."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from knapformer_cli import launch
from knapformer_cli.config import load_config
from knapformer_cli.schema import SlurmConfig
from knapformer_cli.slurm.app import slurm_app
from knapformer_cli.slurm.script import check_dependency, check_slurm, seconds
from knapformer_cli.slurm.snapshot import PACKAGES

ROOT = Path(__file__).parents[3]


def write(run: Path, *words: str) -> str:
    """The script of a job that is not submitted."""
    done = CliRunner().invoke(slurm_app, ["train", *words, f"run.dir={run}"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return (run / "submit.slurm").read_text()


OPTIONS = {
    "--nodes=0": "--nodes is 0; it must be at least 1",
    "--gpus-per-node=-1": "slurm.gpus_per_node is -1; it must be at least 0",
    "--time=tomorrow": "slurm.time is 'tomorrow'; write MINUTES",
    "--time=4 slurm.grace=240": "slurm.grace is 240; it must be at least 1, and less than slurm.time=4",
    "--time=0": "slurm.time is '0'; a job must have some time",
    "--time=1:90": "slurm.time is '1:90'; write MINUTES",
    "--time=1-2:60:00": "with less than 60 after a colon",
    "slurm.memory=lots": "slurm.memory is 'lots'; write a number with K, M, G or T",
    "slurm.memory=-5G": "slurm.memory is '-5G'",
    "slurm.cpus=0": "slurm.cpus is 0; it must be at least 1",
    "--dependency=sometime:3": "--dependency is 'sometime:3'; write singleton or TYPE:JOB",
    "--dependency=afterok:": "--dependency is 'afterok:'",
    "--dependency=3": "--dependency is '3'",
    "--array=0-1": "its elements are runs of a sweep; add --sweep",
    "--sweep --array=0-3 training.seed=1,2": "and the sweep has elements 0 to 1",
    "--sweep --array=all training.seed=1,2": "--array is 'all'; write elements as",
    "--sweep slurm.cpus=4,8": "a sweep over slurm.* or launch.nodes is no job array",
    "launch.device=cuda": "launch.device is cuda, and slurm.gpus_per_node is 0",
    "launch.device=auto --gpus-per-node=8 launch.ranks=4": "a GPU holds one rank",
    "launch.port=29500": "takes its port from its number",
    "--nodes=3 balancer.layout=g2n1": "does not divide the 3 ranks",
    'slurm.account="a\'b"': "cannot be written into a batch script",
    "slurm=nowhere": "slurm=nowhere is no choice",
}


@pytest.mark.parametrize("words", OPTIONS)
def test_options_that_cannot_work_are_refused_and_nothing_is_written(
    words: str, tmp_path: Path, job: list[str]
) -> None:
    with pytest.raises(ValueError, match=re.escape(OPTIONS[words])) as caught:
        write(tmp_path / "run", *job, *words.split())
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


PROFILES = {
    "data=paper_joint profile.ranks=33": "'paper_joint' is for 32 ranks, which do not divide the job's 33",
    "profile.lengths=/nonexist.csv": "profile.lengths=/nonexist.csv does not exist",
    "data=paper_joint profile.layouts=[g3n1]": "g3n1",
    "data=paper_joint calibrate.shortest=512 calibrate.longest=64": "calibrate.longest is 64 and calibrate",
}


@pytest.mark.parametrize("words", PROFILES)
def test_a_profile_that_its_job_would_refuse_is_refused_before(words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(PROFILES[words])):
        CliRunner().invoke(
            slurm_app, ["profile", *words.split(), f"run.dir={tmp_path}/run"], catch_exceptions=False
        )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given", ["singleton", "afterok:7", "afterany:7:8,afterok:9_1", "after:7+5?afternotok:8", "aftercorr:7_*"]
)
def test_a_job_may_wait_for_others_as_sbatch_takes_it(given: str) -> None:
    check_dependency(given)
    with pytest.raises(ValueError, match="--dependency is"):
        check_dependency(f"{given} ")


@pytest.mark.parametrize("memory", ["0", "4096", "500G", "2t"])
@pytest.mark.parametrize("time", ["90", "90:00", "2-30", "1-2:30:15"])
def test_memory_time_and_partition_are_as_sbatch_takes_them(memory: str, time: str) -> None:
    ask = SlurmConfig(memory=memory, time=time, partition="a,b", cpus=1)
    check_slurm(ask)
    memory_off, time_off = replace(ask, memory=f"{memory} "), replace(ask, time=f"{time}:60")
    wrong = {"memory": memory_off, "time": time_off, "partition": replace(ask, partition="a\nb")}
    for name, other in wrong.items():
        with pytest.raises(ValueError, match=rf"slurm\.{name} is .*; write") as caught:
            check_slurm(other)
        assert "\n" not in str(caught.value)


def test_a_laptop_without_gpus_writes_a_job_for_gpu_nodes(tmp_path: Path, small: list[str]) -> None:
    run = tmp_path / "run"
    gpus = [word for word in small if not word.startswith("launch.device")]
    script = write(
        run,
        *gpus,
        "--nodes=4",
        "--gpus-per-node=8",
        "--time=1-00:00:00",
        "--partition=h100",
        "--account=lab",
        "--qos=high",
        "--constraint=ib",
        "--container=/images/torch.sqsh",
        "slurm.mounts=['/data:/data']",
        "slurm.env.NCCL_DEBUG=WARN",
        "slurm.setup=[module load cuda]",
        "slurm.options=[--exclusive]",
        "--dependency=afterok:7",
        "balancer.layout=g4n8",
    )
    written = load_config(run / "config.yaml").launch
    assert (written.device, written.nodes, written.ranks) == ("cuda", 4, 8)
    said = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script, re.MULTILINE))
    assert said["nodes"] == "4"
    assert said["gpus-per-node"] == "8"
    assert said["time"] == "1-00:00:00"
    assert said["dependency"] == "afterok:7"
    assert (said["partition"], said["account"], said["qos"], said["constraint"]) == (
        "h100",
        "lab",
        "high",
        "ib",
    )
    assert "#SBATCH --exclusive" in script
    assert "export NCCL_DEBUG=WARN\nmodule load cuda\n" in script
    assert (
        f"CONTAINER=(--container-image=/images/torch.sqsh --container-mounts={Path.cwd()}:{Path.cwd()}"
        in script
    )
    assert "PYTHON=python " in script


def test_every_directive_and_every_name_of_a_script_says_what_it_is_for(
    tmp_path: Path, job: list[str]
) -> None:
    script = write(tmp_path / "run", *job, "--partition=main", "slurm.memory='0'", "slurm.cpus=4")
    settings = [line for line in script.splitlines() if re.match(r"#SBATCH|[A-Z]+=", line)]
    assert len(settings) > 15
    assert [line for line in settings if " # " not in line] == []


def test_the_snapshot_holds_the_code_of_now_and_what_git_knows_of_it(tmp_path: Path, job: list[str]) -> None:
    """From a checkout of its own, whose working tree differs from its commit."""
    checkout = tmp_path / "checkout"
    for package in PACKAGES:
        shutil.copytree(ROOT / package, checkout / package, ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-C", str(checkout), "-c", "user.name=a", "-c", "user.email=b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    (checkout / "data" / "__init__.py").open("a").write("\n# changed\n")
    (checkout / "models" / "new.py").write_text("new = 1\n")
    code = "from pathlib import Path; from knapformer_cli.slurm.snapshot import take_snapshot\n"
    code += f"print(take_snapshot(Path({str(tmp_path / 'code')!r})))"
    taken = [
        Path(
            subprocess.run(
                [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, check=True
            ).stdout.strip()
        )
        for _ in range(2)
    ]
    assert taken[0] == taken[1]
    record = json.loads((taken[0] / "SNAPSHOT.json").read_text())
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    assert record["commit"] == commit.strip()
    assert record["changed"] == ["data/__init__.py", "models/new.py"]
    assert "+# changed" in (taken[0] / "uncommitted.diff").read_text()
    for path in (
        path for package in PACKAGES for path in (checkout / package).rglob("*") if path.suffix != ".pyc"
    ):
        if path.is_file():
            assert (taken[0] / path.relative_to(checkout)).read_bytes() == path.read_bytes()


def test_one_machine_does_not_pretend_to_be_several(tmp_path: Path, small: list[str]) -> None:
    config = launch.resolve([*small, "launch.nodes=2", f"run.dir={tmp_path}/run"])
    with pytest.raises(ValueError, match=r"launch\.nodes is 2, and this command starts one machine"):
        launch.start(config)
    assert not (tmp_path / "run").exists()


def test_a_written_script_is_sound_shell(tmp_path: Path, job: list[str]) -> None:
    write(tmp_path / "run", *job, "+slurm.env.WORDS='b c'")
    script = tmp_path / "run" / "submit.slurm"
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_a_profile_job_measures_first_and_is_neither_warned_nor_requeued(tmp_path: Path) -> None:
    words = ["profile", "data=paper_joint", "model=flux", f"run.dir={tmp_path}/run", "--time=0:30:00"]
    done = CliRunner().invoke(slurm_app, words, catch_exceptions=False)
    script = (tmp_path / "run" / "submit.slurm").read_text()
    assert done.output.startswith(script)
    assert re.findall(r"--(signal|requeue)", script) == []
    assert "#SBATCH --gpus-per-node=1 " in script
    assert f"SETTINGS=(data=paper_joint model=flux run.dir={tmp_path}/run)" in script
    assert script.index(" calibrate ") < script.index(" profile ")


def test_times_mean_what_slurm_reads_in_them() -> None:
    known = {"5": 300, "1:30": 90, "2:00:00": 7200, "1-00": 86400, "1-2:30": 95400, "1-2:30:15": 95415}
    assert {text: seconds(text) for text in known} == known
