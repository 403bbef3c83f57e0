"""`knapformer profile`: what it finds out about a mix, and what it writes down."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.codes import PRESETS
from knapformer.cluster import step_seconds
from knapformer_cli.config import load_config, to_yaml
from knapformer_cli.profile.blocks import rank_blocks
from knapformer_cli.profile.charts_cluster import attention_KK, moved_KK
from knapformer_cli.profile.command import compare, profile_command, progress_bar
from knapformer_cli.profile.figures import Results, report_json
from knapformer_cli.profile.mix import mix_of_file, mix_of_shards
from knapformer_cli.profile.run import read_run
from knapformer_cli.profile.score import TIMED, score_layout
from knapformer_cli.profile.settings import read_question

COMMAND = [sys.executable, "-m", "knapformer_cli"]
SHORT = "data.codes=g2b4i256f1s0,g1b2i512f1s0,g1b1i512f85s1"
FIGURES = "layout work_max_over_mean tokens_max_over_mean attention_sent moved crossed_nodes plan_ms "
FIGURES += "step_seconds of_ideal hfu peak_tokens"


def profiled(*overrides: str) -> Results:
    """All but the report, in this process."""
    with progress_bar() as (bar, task):
        return compare(read_question(overrides), bar, task)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, small: list[str]) -> Path:
    """A run of eight steps on two ranks."""
    folder = tmp_path_factory.mktemp("runs") / "short"
    words = [*small, "training.steps=8", f"run.dir={folder}"]
    done = subprocess.run([*COMMAND, "train", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize(
    ("name", "sent", "moved"),
    [("paper_lowres", 0.01, 0.05), ("paper_mixres", 0.40, 1.0), ("paper_joint", 0.40, 1.0)],
)
def test_elastic_is_best_on_the_papers_workloads(name: str, sent: float, moved: float) -> None:
    report = report_json(profiled(f"data={name}", "profile.steps=3", "balancer.cost=analytic"))
    assert report["best"] == "elastic"
    rows = {row["layout"]: row for row in report["layouts"]}
    assert set(rows) == {"none", "g1n32", "g2n16", "g4n8", "g8n4", "elastic", TIMED}
    best = rows["elastic"]
    assert best["work_max_over_mean"]["mean"] <= 1.01 and best["work_max_over_mean"]["worst"] <= 1.02
    assert best["attention_sent"] <= sent and best["moved"] <= moved
    # Work that is even takes no even time where some ranks exchange more: a cost that knows it is faster.
    assert rows[TIMED]["of_ideal"] > 0.94 and rows[TIMED]["of_ideal"] > 0.999 * best["of_ideal"]
    seconds = {layout: row["step_seconds"] for layout, row in rows.items()}
    assert report["ideal_step_seconds"] < min(seconds.values())
    gain = seconds["none"] / min(seconds["elastic"], seconds[TIMED])
    assert f"{gain:.2f} times as fast" in report["recommendation"]
    assert set(report["train_with"]) >= {"balancer.layout=elastic"}


def test_the_command_writes_every_figure_picture_and_page(tmp_path: Path) -> None:
    words = [
        SHORT,
        "profile.ranks=8",
        "profile.steps=3",
        "profile.layouts=[g1n4+g4n1]",
        f"run.dir={tmp_path}",
    ]
    done = subprocess.run([*COMMAND, "profile", *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "model=flux" in done.stdout and "Train with balancer.layout=" in done.stdout

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    report = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert report["seed"] == 0 and report["inputs"]["ranks"] == 8
    assert report["inputs"]["sources"] == ["256 px", "512 px", "512 px × 85 frames"]
    assert "g1n4+g4n1" in [row["layout"] for row in report["layouts"]]
    for row in report["layouts"]:
        assert set(row) == set(FIGURES.split())
        assert row["work_max_over_mean"]["worst"] >= row["work_max_over_mean"]["mean"] >= 1
        assert row["plan_ms"]["p99"] >= row["plan_ms"]["median"] > 0
        assert 0 < row["of_ideal"] <= 1 and 0 < row["hfu"] < 1
        assert row["moved"] >= row["crossed_nodes"] >= 0
        parts = report["details"][row["layout"]]["seconds_by_part"]
        assert sum(parts.values()) == pytest.approx(row["step_seconds"])
    assert (tmp_path / "report.html").stat().st_size < 6e6
    for name in ("work", "seconds", "steps", "mix", "traffic", "memory"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            assert picture.width > 1000
    assert (tmp_path / "routing.gif").stat().st_size < 1e6
    with Image.open(tmp_path / "routing.gif") as moving:
        assert moving.n_frames > 10


def test_the_parts_of_a_step_are_all_of_it() -> None:
    scene = profiled(SHORT, "profile.ranks=4", "profile.steps=2", "profile.uniform=false").scene
    for layout in ("none", "elastic", "g4n1"):
        score = score_layout(scene, layout)
        whole = [
            step_seconds(scene.plan(layout, batch), scene.shape, scene.cluster, scene.seconds).total
            for batch in scene.mix.batches
        ]
        assert sum(score.parts_N.values()) == pytest.approx(whole)


def test_pictures_hold_all_work_and_all_traffic() -> None:
    scene = read_question(["data=paper_joint", "profile.ranks=96", "profile.steps=1"]).scene
    (batch,) = scene.mix.batches
    plans = scene.plan("elastic", batch)
    (plan,) = plans
    for group in (1, 2, 5):
        assert moved_KK(plan, group).sum() == pytest.approx(plan.moved() * batch.len_S.sum())
        assert attention_KK(plan, group).sum() == pytest.approx(plan.attention_sent() * batch.len_S.sum())
    blocks = rank_blocks(plans, batch, scene.cost, scene.mix.sources)
    assert blocks.grouped and blocks.height_B.reshape(blocks.columns, -1).sum(1).mean() == pytest.approx(
        1, 0.01
    )
    small = read_question([SHORT, "profile.ranks=4", "profile.steps=1"]).scene
    plans = small.plan("elastic", small.mix.batches[0])
    blocks = rank_blocks(plans, small.mix.batches[0], small.cost, small.mix.sources)
    work_R = plans[0].work_R(small.cost)
    np.testing.assert_allclose(np.bincount(blocks.column_B, blocks.height_B), work_R / work_R.mean())
    assert blocks.most == pytest.approx(plans[0].max_over_mean(small.cost))


def test_lengths_from_shards_are_those_that_a_run_trains_on(run: Path, small: list[str]) -> None:
    overrides = [*small, "profile.ranks=2", "profile.steps=8"]
    planned, (trained, _) = read_question(overrides).scene.mix, read_run(run, "elastic", 8)
    assert sorted(planned.sources) == sorted(trained.sources) == ["clips", "pictures"]
    assert trained.steps == planned.steps == list(range(1, 9))
    for a, b in zip(planned.batches, trained.ordered().batches, strict=True):
        for name in ("len_S", "home_S", "source_S"):
            np.testing.assert_array_equal(getattr(a, name), getattr(b, name))
    wide = mix_of_shards(read_question([*overrides[:-2], "profile.ranks=3", "profile.steps=2"]).config)
    assert sorted(wide.batches[1].len_S) == sorted(planned.batches[1].len_S)  # ranks are no part of the order


def test_a_profile_of_a_run_puts_measured_beside_modelled(run: Path, tmp_path: Path) -> None:
    profile_command([f"profile.run={run}", "profile.steps=5", f"run.dir={tmp_path}"])
    report = json.loads((tmp_path / "report.json").read_text())
    measured = report["measured"]
    assert measured["steps"] == [4, 5, 6, 7, 8] and measured["layout"] == "elastic"
    assert measured["step_seconds"] > 0 and len(measured["busy_seconds"]) == 2
    assert report["inputs"]["cluster"]["name"] == "cpu" and report["inputs"]["model"]["width"] == 32
    assert (tmp_path / "measured.png").is_file()
    page = (tmp_path / "report.html").read_text()
    assert "Measured beside modelled" in page and "waiting for data" in page


def test_overrides_win_over_what_the_run_had(run: Path) -> None:
    question = read_question([f"profile.run={run}", "balancer.domain=1", "cluster=h100"])
    assert question.scene.domain == 1 and question.scene.shape.width == 32
    assert question.config.cluster.name == "h100"
    with pytest.raises(ValueError, match=r"profile\.ranks=3 is not the 2 ranks of the run"):
        read_question([f"profile.run={run}", "profile.ranks=3"])


def test_a_run_is_profiled_where_its_calibration_is_not(run: Path, tmp_path: Path) -> None:
    for name in ("metrics.jsonl", "lengths.jsonl"):
        (tmp_path / name).write_text((run / name).read_text())
    config = load_config(run / "config.yaml")
    config.balancer.cost = "/elsewhere/fit.json"
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    question = read_question([f"profile.run={tmp_path}", f"calibrate.folder={tmp_path}"])
    assert any("/elsewhere/fit.json, which is not here" in note for note in question.notes)
    assert question.cost.startswith("the analytic cost")


def test_a_run_without_metrics_or_lengths_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text((run / "config.yaml").read_text())
    with pytest.raises(ValueError, match=r"has no metrics\.jsonl with steps"):
        read_question([f"profile.run={tmp_path}"])
    (tmp_path / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    with pytest.raises(ValueError, match=r"has no lengths\.jsonl .*logging\.lengths=true"):
        read_question([f"profile.run={tmp_path}"])


DAMAGES = {
    '{"source": [0, 2, 1]}': "source 2 is no whole number from 0 to 1",
    '{"source": [0, -1, 1]}': "source -1 is no whole number from 0 to 1",
    '{"source": [0, 1]}': "length has 3 sequences, source 2 and per_rank 3; they must agree",
    '{"per_rank": [2, 2]}': "length has 3 sequences, source 3 and per_rank 4; they must agree",
    '{"per_rank": [4, -1]}': "per_rank -1 is no whole number from 0 to",
    '{"length": [5, 0, 7]}': "length 0 is no whole number from 1 to",
    '{"length": [5, 6.5, 7]}': "length 6.5 is no whole number from 1 to",
    '{"length": null}': "length must be a list of whole numbers",
    '{"per_rank": null}': "per_rank must be a list of whole numbers",
    '{"sources": null}': "sources must be a list of names",
    '{"sources": ["a", "b"]}': "sources ['a', 'b'] are not ['clips', 'pictures'], as in step 8",
    '{"step": [7]}': "step must be a whole number",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_row_of_lengths_is_named(run: Path, tmp_path: Path, damage: str) -> None:
    """A change of a good row of step 7; null stands for a key that is missing."""
    good = {"step": 7, "sources": ["clips", "pictures"], "length": [5, 6, 7], "source": [0, 1, 1]}
    row = {**good, "per_rank": [2, 1], **json.loads(damage)}
    kept = {key: value for key, value in row.items() if value is not None}
    (tmp_path / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text())
    path = tmp_path / "lengths.jsonl"
    rows = (run / "lengths.jsonl").read_text().splitlines()
    path.write_text("\n".join([*rows[:6], json.dumps(kept), rows[7]]))
    with pytest.raises(ValueError, match=r".") as caught:
        read_run(tmp_path, "elastic", 8)
    said = str(caught.value)
    assert said.startswith(f"{path} step {row['step']}: {DAMAGES[damage]}") and "\n" not in said


ROWS = [
    (700, "clip", 2, 1),
    (20, "photo", 1, 0),
    (30, "photo", 1, 3),
    (900, "clip", 1, 0),
    (5, "photo", 2, 1),
]


def test_csv_and_jsonl_of_the_same_lengths_are_the_same_mix(tmp_path: Path) -> None:
    csv, jsonl = tmp_path / "lengths.csv", tmp_path / "lengths.jsonl"
    csv.write_text("key,length,source,step,rank\n" + "".join(f"x,{a},{b},{c},{d}\n" for a, b, c, d in ROWS))
    named = [dict(zip(("length", "source", "step", "home"), row, strict=True)) for row in ROWS]
    jsonl.write_text("".join(json.dumps(row) + "\n" for row in named))
    mixes = [read_question([f"profile.lengths={path}", "profile.ranks=4"]).scene.mix for path in (csv, jsonl)]
    for mix in mixes:
        assert mix.sources == ["photo", "clip"] and mix.steps == [1, 2]
        assert [batch.len_S.tolist() for batch in mix.batches] == [[20, 900, 30], [700, 5]]
        assert [batch.home_S.tolist() for batch in mix.batches] == [[0, 0, 3], [1, 1]]
        assert [batch.source_S.tolist() for batch in mix.batches] == [[0, 1, 0], [1, 0]]


def test_lines_without_steps_fill_batches_and_ranks_in_turn(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("length\n" + "40\n" * 11)
    mix = read_question([f"profile.lengths={path}", "profile.ranks=2", "training.batch_tokens=130"]).scene.mix
    assert [batch.len_S.tolist() for batch in mix.batches] == [
        [40] * 3
    ] * 3  # the two lines left are no batch
    assert mix.batches[0].home_S.tolist() == [0, 0, 1]


LINES = {
    "length,source\n100,a\n0,b\n": "line 3: length '0' is no whole number from 1 to 1099511627776",
    "length\n99999999999999\n": "line 2: length '99999999999999' is no whole number from 1 to 1099511627776",
    "length\n100\nlong\n": "line 3: length 'long' is no whole number",
    "length\n100\n\n1.5\n": "line 4: length '1.5' is no whole number",
    "length,rank\n5,1\n5,9\n": "line 3: rank '9' is no whole number from 0 to 3",
    "length,step\n5,1\n5,\n": "line 3: step '' is no whole number",
    "tokens\n5\n": "line 1: the header ['tokens'] has no column length",
    "length\n": "has no line with a length",
    "": "lengths.csv is empty",
    "length,length\n5,6\n": "line 1: the header ['length', 'length'] has column length more than once",
    "length,step,step\n5,1,2\n": "has column step more than once",
    "length\n99999\n": "line 2: length 99999 is more than training.batch_tokens=8192",
}


@pytest.mark.parametrize("text", LINES)
def test_a_line_that_is_no_length_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=r".") as caught:
        mix_of_file(path, ranks=4, steps=20, batch_tokens=8192)
    assert LINES[text] in str(caught.value) and "\n" not in str(caught.value)


MISTAKES = {
    "data.codes=g8b4i256f1s0,g2x5": "'g2x5' is no length code",
    "data.codes=g0b4i256f1s0": "length code 'g0b4i256f1s0' has no tokens",
    "data=paper_joint profile.ranks=48": "is for 32 ranks, which do not divide the job's 48",
    "data=paper_joint cluster=h900": "cluster=h900 is no choice; use one of",
    "data=paper_joint cluster.bandwidth=-1": "cluster.bandwidth",
    "data=paper_joint profile.steps=0": "profile.steps is 0",
    "data=paper_joint profile.layouts=[g3n3]": "'g3n3' names 9 ranks",
    "data=paper_joint profile.lengths=x.csv": "are two origins of lengths; give one",
    "data=paper_joint run.dir=/proc/x": "run.dir /proc/x cannot be written",
    "data=paper_joint training.max_tokens_per_rank=500": "training.max_tokens_per_rank=500 is below",
    "profile.lengths=/nowhere.csv": "profile.lengths=/nowhere.csv does not exist",
    "profile.lengths=/tmp": "profile.lengths=/tmp is a folder",
    "profile.run=/nowhere": "/nowhere/config.yaml does not exist",
    "data.streams=4": "data.streams=4 must be at least the number of ranks, 32",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_a_user_gets_wrong_is_one_sentence(tmp_path: Path, mistake: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        profile_command([f"run.dir={tmp_path}/made/here", "profile.steps=1", *mistake.split()])
    assert MISTAKES[mistake] in str(caught.value) and "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_what_is_refused_leaves_a_folder_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "work.png").write_text("before")
    with pytest.raises(ValueError, match=r"training\.max_tokens_per_rank=500 is below"):
        profile_command(["data=paper_joint", "training.max_tokens_per_rank=500", f"run.dir={tmp_path}"])
    assert [path.name for path in tmp_path.iterdir()] == ["work.png"]
    assert (tmp_path / "work.png").read_text() == "before"


def test_no_new_figures_stand_beside_a_page_that_was_not_written(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("before")
    (tmp_path / "report.html").mkdir()  # stops the page after the pictures
    with pytest.raises(IsADirectoryError):
        profile_command([SHORT, "profile.ranks=4", "profile.steps=1", f"run.dir={tmp_path}"])
    assert (tmp_path / "work.png").is_file()
    assert (tmp_path / "report.json").read_text() == "before"


def test_a_mistake_is_exit_code_2_and_codes_cannot_be_trained(tmp_path: Path) -> None:
    for command, mistake in (("profile", "data.codes=g2x5"), ("train", "data=paper_joint")):
        words = [*COMMAND, command, mistake, f"run.dir={tmp_path}/none"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and done.stderr.startswith("error: ")
        assert "Traceback" not in done.stderr and not (tmp_path / "none").exists()
    assert "lengths without pixels" in done.stderr


def test_the_search_finds_no_worse_than_every_uniform_spec_and_the_same_twice() -> None:
    overrides = [SHORT, "profile.ranks=8", "profile.steps=4", "profile.tune=true", "balancer.cost=analytic"]
    first, again = profiled(*overrides), profiled(*overrides)
    assert first.tuned is not None and first.tuned == again.tuned
    seconds = {score.layout: score.seconds for score in first.scores}
    assert seconds[first.tuned[0]] <= min(seconds[x] for x in seconds if x.startswith("g"))
    assert report_json(first)["tuned"]["layout"] == first.tuned[0]


def test_under_a_cap_every_possible_layout_keeps_it_and_none_is_still_compared_with() -> None:
    results = profiled("data=paper_joint", "profile.steps=2", "training.max_tokens_per_rank=12500")
    assert "none" in results.refused and results.best.layout != "none"
    assert results.none.peak_N.max() > 12500
    for score in results.possible:
        assert score.peak_N.max() <= 12500
    assert {row["layout"] for row in report_json(results)["refused"]} == set(results.refused)


def test_where_no_layout_fits_the_memory_the_cap_that_is_advised_does() -> None:
    overrides = ["data=paper_joint", "profile.steps=2", "cluster.memory_gib=12"]
    sentence = profiled(*overrides).sentence()
    assert sentence.startswith("No layout fits the device memory")
    cap = sentence.split("training.max_tokens_per_rank=")[1].split()[0]
    results = profiled(*overrides, f"training.max_tokens_per_rank={cap}")
    assert results.best.memory_R.max() <= 12 * 2**30
    assert results.best.micro_N.max() > 1


def test_every_preset_has_a_data_choice() -> None:
    for name in PRESETS:
        assert read_question([f"data={name}", "profile.steps=1"]).scene.mix.ranks == 32
