"""What a user can write on the command line, and what each mistake is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from knapformer_cli.config import check_same_run, compose, expand_sweep, from_yaml, load_config, to_yaml
from knapformer_cli.launch import check_settings, write_run_folder

MISTAKES = {
    "model.dpeth=3": "model.dpeth is no key of the configuration",
    "+model.dpeth=3": "model.dpeth is no key of the configuration",
    "++nothing.here=1": "nothing.here is no key of the configuration",
    "seed=3": "did you mean training.seed?",
    "training.steps=abc": "training.steps=abc has the wrong type",
    "training.steps=1.5": "training.steps=1.5 has the wrong type",
    "training.flow.mean=[1,2]": "training.flow.mean=[1,2] has the wrong type",
    "launch.ranks=two": "launch.ranks=two has the wrong type",
    "training.steps=0": "training.steps is 0; it must be at least 1",
    "training.seed=-1": "training.seed is -1; it must be at least 0",
    "training.caption_dropout=2": "training.caption_dropout is 2.0; it must lie between 0 and 1",
    "optimizer.lr=nan": "optimizer.lr is nan; it must be a finite number",
    "sampling.guidance=inf": "sampling.guidance is inf; it must be a finite number",
    "training.seed=99999999999999999999": "it must be a finite number below 2^63",
    "optimizer.eps=-1": "optimizer.eps is -1.0; it must be greater than 0",
    "balancer.gamma=-1": "balancer.gamma is -1.0; it must be at least 0",
    "training.steps=???": "training.steps=??? says that the value is missing",
    "run.dir=a b{c": "need quotes of their own",
    "optimizer.lr=1e-3,1e-4": "add --sweep",
    "scheduler.decay=stepwise": "scheduler.decay is 'stepwise'; it must be one of constant, cosine, linear",
    "sampling.clips=[1,2]": "sampling.clips is [1, 2]; it must be 3 numbers",
    "model=huge": "model=huge is no choice; use one of base,",
    "training=5": "training=5 is no choice",
    "experiment=nope": "experiment=nope is no choice",
    "data=shards experiment=null": "experiment=None is no choice",
    "data=shards data.sources.a.weight=x": "data.sources.a.weight=x has the wrong type",
    "data=shards data.sources.a.wieght=1": "data.sources.a.wieght is no key",
    "--steps": "--steps is no option",
    "-x": "-x is no option",
    "steps": "write key=value",
    "hydra.run.dir=x": "hydra's own settings",
    "a=[1": "cannot be read as key=value",
}


@pytest.mark.parametrize("override", MISTAKES)
def test_a_mistake_is_one_sentence_that_names_it(override: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        compose(override.split() if override.startswith("data=") else [override])
    text = str(caught.value)
    assert MISTAKES[override] in text
    assert "\n" not in text


def test_overrides_reach_their_fields_with_their_types() -> None:
    config = compose(
        ["training.steps=7", "++optimizer.lr=3", "model=small", "training.max_tokens_per_rank=512"]
    )
    assert config.training.steps == 7
    assert config.optimizer.lr == 3.0
    assert isinstance(config.optimizer.lr, float)
    assert config.model.width > compose(["model=tiny"]).model.width
    assert config.training.max_tokens_per_rank == 512


def test_a_source_can_be_added_with_and_without_a_plus() -> None:
    for override in ("data.sources.mine.shards=x.tar", "+data.sources.mine.shards=x.tar"):
        assert compose([override]).data.sources["mine"].shards == "x.tar"
    with pytest.raises(ValueError, match=r"data\.sources\.mine\.wieght is no key"):
        compose(["data.sources.mine.wieght=3"])


def test_every_experiment_and_every_choice_composes() -> None:
    from importlib.resources import files

    for group in files("conf").iterdir():
        for choice in group.iterdir() if group.is_dir() else []:
            if choice.name.endswith(".yaml"):
                compose([f"{group.name}={choice.name.removesuffix('.yaml')}"])


def test_yaml_gives_the_same_configuration_back(tmp_path: Path) -> None:
    config = compose([f"run.dir={tmp_path}/run"])
    assert from_yaml(to_yaml(config)) == config
    assert load_config(write_run_folder(config)) == config


def test_a_sweep_is_every_combination_in_order() -> None:
    runs = expand_sweep(["optimizer.lr=1e-3,1e-4", "training.steps=5", "model=tiny,small"])
    assert runs == [
        [f"optimizer.lr={lr}", "training.steps=5", f"model={model}"]
        for lr in ("0.001", "0.0001")
        for model in ("tiny", "small")
    ]


def test_a_run_folder_of_another_configuration_is_refused(tmp_path: Path) -> None:
    ours = [f"run.dir={tmp_path}", "optimizer.lr=1e-3", "training.steps=8"]
    write_run_folder(compose(ours))
    check_same_run(compose([*ours, "launch.ranks=4", "balancer.layout=none", "checkpoint.every=1"]), tmp_path)
    with pytest.raises(ValueError, match=r"optimizer\.lr=0\.001, not 0\.002"):
        check_same_run(compose([*ours, "optimizer.lr=2e-3"]), tmp_path)
    with pytest.raises(ValueError, match=r"training\.steps=8, not 9.*scheduler\.steps"):
        check_same_run(compose([*ours, "training.steps=9"]), tmp_path)


def test_more_steps_are_the_same_run_when_the_schedule_does_not_depend_on_them(tmp_path: Path) -> None:
    for number, fixed in enumerate(("scheduler.decay=constant", "scheduler.steps=8")):
        ours = [f"run.dir={tmp_path}/{number}", fixed, "training.steps=8"]
        write_run_folder(compose(ours))
        check_same_run(compose([*ours, "training.steps=9"]), tmp_path / str(number))


SETTINGS = {
    "balancer.layout=g1n3": "does not divide the 2 ranks",
    "balancer.layout=g3n1": "g3n1",
    "balancer.layout=bags": "is not gXnY",
    "model.heads=3": "model.width=128 is not a multiple of model.heads=3",
    "data.max_text=100000": "data.max_text is 100000",
    "data.patch=0": "data.patch=0 must be at least 1",
    "balancer.kernel=flash9": "'flash9' is not one of auto",
    "sampling.pictures=[1,1]": "are no multiples of data.patch",
}


@pytest.mark.parametrize("override", SETTINGS)
def test_settings_that_cannot_work_are_refused_before_data_is_read(override: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        check_settings(compose(["launch.ranks=2", "launch.device=cpu", override]))
    assert SETTINGS[override] in str(caught.value)


def test_help_needs_no_torch_and_no_hydra() -> None:
    code = (
        "import sys, knapformer_cli.app; print([m for m in ('torch', 'hydra', 'numpy') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
