"""The command as its users run it, in processes of its own."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from knapformer_cli.launch import check_data, check_settings, resolve, write_run_folder
from knapformer_cli.sample import sample_command
from knapformer_cli.training.checkpoint import check_complete, complete_checkpoints
from knapformer_cli.training.metrics import read_metrics
from tests.waiting import wait_for

COMMAND = [sys.executable, "-m", "knapformer_cli"]


def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], capture_output=True, text=True, timeout=300, env={**os.environ, **(env or {})}
    )


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    """Exit code 2 and one sentence with these words, no traceback."""
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("error:")]) == 1, done.stderr


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


def start(folder: Path, *words: str, **options) -> subprocess.Popen[str]:
    """`knapformer train` into the folder, in a session of its own, with decoding processes."""
    return subprocess.Popen(
        [*COMMAND, "train", *words, "data.workers=1", f"run.dir={folder}"],
        env={**os.environ, "RUN_OF_THIS_TEST": str(folder)},
        start_new_session=True,
        text=True,
        **options,
    )


def processes_of(folder: Path) -> list[int]:
    """Every living process that descends from `start`: it has the folder in its environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RUN_OF_THIS_TEST={folder}".encode() in process.read_bytes().split(b"\0"):
                found.append(int(process.parent.name))
        except OSError:  # it ended meanwhile
            continue
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    """A run of 20 steps on two ranks, with checkpoints every 5, that nobody disturbed."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    done = run("train", *small, "training.steps=20", "checkpoint.every=5", f"run.dir={folder}")
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_leaves_its_folder_as_designed(finished: Path) -> None:
    rows = read_metrics(finished / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 21))
    names = "loss grad_norm lr tokens samples tokens_per_second step_seconds data_seconds plan_seconds "
    names += "route_seconds work_max_over_mean_before work_max_over_mean_after busy_max_over_mean "
    names += "attention_sent moved mfu memory_gib"
    assert set(names.split()) <= set(rows[0])
    kept = [path.name for path in complete_checkpoints(finished / "checkpoints")]
    assert kept == ["0000000015", "0000000020"]
    assert not list((finished / "checkpoints").glob(".partial*"))
    with Image.open(finished / "samples" / "0000000020-clips.gif") as clip:
        assert clip.n_frames > 1
    Image.open(finished / "samples" / "0000000020-pictures.png").verify()


def test_killed_and_resumed_logs_bit_for_bit_the_same_losses(
    finished: Path, tmp_path: Path, small: list[str]
) -> None:
    folder = tmp_path / "killed"
    words = [*small, "training.steps=20", "checkpoint.every=5"]
    job = start(folder, *words, stderr=subprocess.DEVNULL)
    assert wait_for(lambda: len(losses(folder)) >= 10, 120)
    for process in processes_of(folder):  # launcher and workers at once, as when a node goes down
        os.kill(process, signal.SIGKILL)
    job.wait()
    assert len(losses(folder)) < 20
    done = run("train", *words, f"run.dir={folder}")
    assert done.returncode == 0, done.stderr
    assert losses(folder) == losses(finished)


def test_ctrl_c_ends_every_process_in_seconds_and_leaves_whole_checkpoints(
    tmp_path: Path, small: list[str]
) -> None:
    folder = tmp_path / "interrupted"
    job = start(folder, *small, "training.steps=100000", "checkpoint.every=1", stderr=subprocess.PIPE)
    assert wait_for(lambda: len(losses(folder)) >= 3, 120)
    os.killpg(job.pid, signal.SIGINT)  # what a terminal sends: to the launcher and to all it started
    _, said = job.communicate(timeout=20)
    assert job.returncode == 128 + signal.SIGINT
    assert "interrupted; last complete checkpoint: 00000000" in said
    assert "Traceback" not in said
    assert "Warning" not in said
    assert "death signal" not in said
    assert wait_for(lambda: not processes_of(folder), 15), processes_of(folder)
    for path in complete_checkpoints(folder / "checkpoints"):
        check_complete(path)


def test_a_run_folder_is_one_jobs_and_workers_do_not_outlive_a_killed_launcher(
    tmp_path: Path, small: list[str]
) -> None:
    folder = tmp_path / "orphans"
    words = [*small, "training.steps=100000"]
    job = start(folder, *words, stderr=subprocess.DEVNULL)
    assert wait_for(lambda: len(losses(folder)) >= 2, 120)
    with pytest.raises(ValueError, match="is in use by another job"):
        prepare([*words, "data.workers=1", f"run.dir={folder}"])
    job.kill()
    job.wait()
    assert wait_for(lambda: not processes_of(folder), 15), processes_of(folder)


def test_a_bare_torchrun_trains_the_same(finished: Path, tmp_path: Path, small: list[str]) -> None:
    folder = tmp_path / "bare"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [
        "-m",
        "knapformer_cli",
        "train",
        *small,
        "training.steps=20",
        "training.seed=0",
        f"run.dir={folder}",
    ]
    done = subprocess.run([*torchrun, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert losses(folder) == losses(finished)
    done = subprocess.run(
        [*torchrun, *words[:3], "model.dpeth=3"], capture_output=True, text=True, timeout=300
    )
    assert "exitcode  : 2" in done.stderr
    assert done.stderr.count("error: model.dpeth is no key of the configuration") == 1


def test_samples_are_drawn_from_a_checkpoint(finished: Path, tmp_path: Path) -> None:
    words = ["--prompt", "a two", "--prompt", "a six", "--count", "3", "--steps", "2"]
    done = run("sample", str(finished), *words, "--out", str(tmp_path / "a"))
    assert done.returncode == 0, done.stderr
    done = run(
        "sample", str(finished), *words, "--frames", "4", "--size", "20x24", "--out", str(tmp_path / "b")
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("*/*")) == [
        "sample-clips.gif",
        "sample-clips.png",
        "sample-pictures.png",
    ]
    refused(run("sample", str(finished), "--prompt", "x", "--size", "0x9"), "--size is '0x9'")
    refused(run("sample", str(tmp_path / "nothing"), "--prompt", "x"), "does not exist")


@pytest.mark.parametrize(
    ("prompt", "size", "count", "words"),
    [
        ("x" * 65, "", 1, "has 65 bytes; this model reads at most 64"),
        (
            "x",
            "21x24",
            1,
            "--size is '21x24'; write HEIGHTxWIDTH in pixels, each a multiple of the patch of 2",
        ),
        ("x", "40000x40000", 1, "need about"),
        ("x", "", 10**9, "lower --size, --frames or --count"),
    ],
)
def test_a_drawing_that_would_be_cut_or_fill_the_memory_is_refused(
    finished: Path, tmp_path: Path, prompt: str, size: str, count: int, words: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        sample_command(finished, [prompt], tmp_path, size, 1, count, 0, None, None, "cpu")


def test_what_a_user_gets_wrong_is_one_sentence_and_exit_code_2(
    finished: Path, tmp_path: Path, small: list[str]
) -> None:
    refused(run("train", "model.dpeth=3"), "model.dpeth is no key")
    done = run("train", *small, f"run.dir={tmp_path}/run", "data.sources.clips.shards=/nowhere/a.tar")
    refused(done, "/nowhere/a.tar")
    assert not (tmp_path / "run").exists()
    done = run("--debug", "train", "model.dpeth=3")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.sources.clips.shards={tmp}/empty", "{tmp}/empty"),
        ("balancer.layout=g1n3", "does not divide the 2 ranks"),
        ("balancer.layout=g2n1 model.heads=1 model.rope_axes=[8,12,12]", "cannot split 1 heads"),
        ("checkpoint.resume=/nowhere", "/nowhere does not exist"),
        ("training.batch_tokens=10", "10"),
        ("run.dir={finished} training.seed=5", "training.seed=0, not 5"),
        ("run.dir={finished} checkpoint.resume=none", "checkpoint.resume=none needs a run.dir of its own"),
        ("run.dir=/proc/run", "run.dir /proc/run cannot be written"),
        ("launch.port={port}", "launch.port {port} cannot be used"),
        ("launch.device=cuda", "this machine shows no GPU"),
        ("balancer.cost=nope", "balancer.cost is 'nope'; it must be auto, analytic, cluster or a file"),
    ],
)
def test_what_cannot_work_is_refused_before_any_rank_starts(
    finished: Path, tmp_path: Path, small: list[str], override: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"tmp": tmp_path, "finished": finished, "port": taken.getsockname()[1]}
        given = override.format(**names).split()
        with pytest.raises(ValueError, match=re.escape(words.format(**names))):
            prepare([*small, f"run.dir={tmp_path}/run", *given])


def prepare(overrides: list[str]) -> None:
    """What `knapformer train` does before it starts the ranks."""
    config = resolve(overrides)
    check_settings(config)
    check_data(config)
    write_run_folder(config)


def test_an_error_that_only_the_plan_shows_ends_every_rank_with_one_sentence(
    tmp_path: Path, small: list[str]
) -> None:
    folder = tmp_path / "capped"
    job = start(folder, *small, "training.max_tokens_per_rank=20", stderr=subprocess.PIPE)
    _, said = job.communicate(timeout=120)
    assert job.returncode == 2, said
    assert said.count("error: training.max_tokens_per_rank=20 is below") == 1, said
    assert "Traceback" not in said
    assert wait_for(lambda: not processes_of(folder), 15), processes_of(folder)


def test_a_damaged_checkpoint_is_refused(finished: Path, tmp_path: Path, small: list[str]) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(finished), str(copy)], check=True)
    newest = complete_checkpoints(copy / "checkpoints")[-1]
    part = next(newest.glob("*.distcp"))
    part.write_bytes(part.read_bytes()[:-10])
    words = ["train", *small, "training.steps=30", f"run.dir={copy}"]
    refused(run(*words), f"{newest} is no complete checkpoint: {part.name} is")
    (newest / "COMPLETE").unlink()  # now it is a save that never ended: auto takes the one before
    refused(run(*words, f"checkpoint.resume={newest}"), "COMPLETE is missing")


def test_dry_run_prints_the_configuration_and_touches_nothing(tmp_path: Path) -> None:
    done = run("train", "--dry-run", f"run.dir={tmp_path}/run", "training.steps=7")
    assert done.returncode == 0, done.stderr
    assert "  steps: 7" in done.stdout
    assert "ranks of:" in done.stdout
    assert not (tmp_path / "run").exists()


def test_another_package_of_the_same_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "__init__.py").touch()
    done = run("train", "--dry-run", env={"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"})
    refused(done, f"{tmp_path}/models")


def test_the_demo_set_is_made_by_command(tmp_path: Path) -> None:
    done = run("data", "demo", "--out", str(tmp_path / "digits"))
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "digits").glob("*.tar"))) >= 3


def test_a_sweep_trains_a_run_for_each_value(tmp_path: Path, small: list[str]) -> None:
    done = run(
        "train", "--sweep", *small, "launch.ranks=1", "training.steps=1,2", f"run.dir={tmp_path}/sweep"
    )
    assert done.returncode == 0, done.stderr
    assert [len(losses(tmp_path / "sweep" / number)) for number in ("00", "01")] == [1, 2]
    configs = [json.dumps((tmp_path / "sweep" / n / "config.yaml").read_text()) for n in ("00", "01")]
    assert "group: sweep" in configs[0]
