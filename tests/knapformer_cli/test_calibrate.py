"""What calibration measures, and that its fit says what was measured."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from knapformer_cli.calibrate import build_subject, calibrate_command, check, check_lengths, fit
from knapformer_cli.calibration import Calibration
from knapformer_cli.config import compose
from knapformer_cli.cost import resolve_for_machine
from knapformer_cli.measure import Case, Subject, fitted_cases, grow_lengths, held_out_cases, measure
from knapformer_cli.schema import Config

TINY = ["model.width=32", "model.heads=4", "model.rope_axes=[2,2,4]", "model.single_blocks=1"]
TINY += ["model.text.width=32", "model.text.layers=1", "launch.device=cpu", "experiment=none"]
LENGTHS, DEGREES = [64, 128, 256, 512], [1, 2, 4]


@pytest.fixture(scope="module")
def config() -> Config:
    return compose(TINY)


@pytest.fixture(scope="module")
def subject(config: Config) -> Subject:
    torch.set_num_threads(1)
    return build_subject(config, torch.device("cpu"))


def test_a_rank_has_its_tokens_and_its_share_of_the_pairs() -> None:
    case = Case(((512, 4), (64, 1)))
    assert (case.tokens, case.squares) == (128 + 64, 512**2 / 4 + 64**2)


@pytest.mark.parametrize(
    ("lengths", "degrees"), [(LENGTHS, DEGREES), ([72, 144, 288], [1, 3, 8]), ([4, 8, 16], [1])]
)
def test_what_is_held_out_was_never_fitted_and_fits_the_device(
    lengths: list[int], degrees: list[int]
) -> None:
    fitted, held_out = fitted_cases(lengths, degrees), held_out_cases(lengths, degrees)
    assert held_out == held_out_cases(lengths, degrees)
    seen = {length for case in fitted for length, _ in case.chunks}
    assert seen == set(lengths)
    assert not seen & {length for case in held_out for length, _ in case.chunks}
    assert len({case.chunks for case in held_out}) > 4
    for case in fitted + held_out:
        assert case.tokens <= lengths[-1]
        assert all(length % degree == 0 for length, degree in case.chunks)


def test_attention_has_the_shapes_of_whole_and_of_heads_split_sequences(subject: Subject) -> None:
    chunks = ((8, 1), (16, 4), (12, 2), (4, 1))
    rows = [length // degree for length, degree in chunks]
    q, k, v = (torch.randn(sum(rows), 4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))
    out = subject.attend(Case(chunks))(q, k, v)
    parts = zip(*(x.split(rows) for x in (q, k, v, out)), chunks, strict=True)
    for *qkv, got, (length, degree) in parts:
        # Blocks of heads of M=4: a sequence split over g holds 4/g of them, each over all its tokens.
        shares = [x.reshape(4 // degree, length, 1, 8).transpose(1, 2) for x in qkv]
        if degree == 1:
            shares = [x.transpose(0, 1)[None] for x in qkv]
        want = F.scaled_dot_product_attention(*shares)
        want = want[0].transpose(0, 1) if degree == 1 else want.transpose(1, 2).reshape(got.shape)
        torch.testing.assert_close(got, want)


def test_every_parameter_gets_a_gradient_from_a_step(subject: Subject) -> None:
    subject.model.zero_grad(set_to_none=True)
    subject.step(Case(((64, 4), (32, 1))))()
    assert all(p.grad is not None for p in subject.model.parameters())


def test_lengths_double_to_the_longest_and_are_three_where_patience_is_short(subject: Subject) -> None:
    assert list(grow_lengths(subject, 20, 8, 1e-9, 200)) == [24, 48, 96, 192]
    assert list(grow_lengths(subject, 20, 8, 1e-9, None)) == [24, 48, 96]


def test_longer_steps_measure_longer(subject: Subject) -> None:
    short, long = measure(subject, [Case(((64, 1),)), Case(((1024, 1),))], repeats=3)
    assert 0 < 2 * short < long


def test_a_fit_says_what_was_measured(config: Config, subject: Subject) -> None:
    cases = fitted_cases(LENGTHS, DEGREES) + held_out_cases(LENGTHS, DEGREES)
    noise = np.random.default_rng(0).uniform(0.97, 1.03, len(cases))
    seconds = [
        (0.01 + 1e-4 * case.tokens + 2e-7 * case.squares) * x for case, x in zip(cases, noise, strict=True)
    ]
    seconds[3] *= 4  # another job came between
    found = fit(config, subject, cases, seconds)
    assert found.held_out_error < 0.03
    assert found.gamma_error > 2 * found.held_out_error
    assert (found.cost.linear, found.overhead) == pytest.approx((1e-4, 0.01), rel=0.1)
    assert found.gamma == pytest.approx(6 * config.model.width * found.cost.quadratic / found.cost.linear)
    assert found.longest == LENGTHS[-1]


def test_a_fit_that_explains_nothing_is_not_saved(config: Config, subject: Subject) -> None:
    cases = fitted_cases(LENGTHS, DEGREES) + held_out_cases(LENGTHS, DEGREES)
    noise = np.random.default_rng(0).lognormal(0, 1.5, len(cases))
    found = fit(config, subject, cases, list(0.01 * noise))
    with pytest.raises(ValueError, match=r"misses steps that were held out by \d+% .*quiet machine"):
        check(found)


@pytest.mark.parametrize(
    ("shortest", "longest", "least"),
    [(64, 64, 256), (64, 255, 256), (4, 8, 16), (512, 64, 2048), (6, 31, 32)],
)
def test_lengths_that_leave_none_to_judge_by_are_refused_before_measuring(
    shortest: int, longest: int, least: int, tmp_path: Path
) -> None:
    words = [*TINY, f"calibrate.folder={tmp_path}/fits", f"calibrate.shortest={shortest}"]
    said = f"calibrate.longest is {longest} and calibrate.shortest is {shortest};.* at least {least}$"
    with pytest.raises(ValueError, match=said):
        calibrate_command([*words, f"calibrate.longest={longest}"])
    assert not (tmp_path / "fits").exists()


def test_the_least_lengths_leave_some_to_judge_by(config: Config, subject: Subject) -> None:
    narrow = copy.deepcopy(config)
    narrow.calibrate.shortest, narrow.calibrate.longest = 3, 16
    check_lengths(narrow)
    lengths = list(grow_lengths(subject, 3, 4, 1e-9, 16))
    assert lengths == [4, 8, 16]
    assert len(held_out_cases(lengths, DEGREES)) >= 12


def test_calibrate_leaves_a_file_that_training_takes_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = f"calibrate.folder={tmp_path}"
    calibrate_command([*TINY, folder, "calibrate.repeats=3", "calibrate.longest=256"])
    (path,) = tmp_path.glob("*.json")
    found = Calibration.load(path)
    assert f"{found.held_out_error:.1%}" in capsys.readouterr().out
    assert {row["held_out"] for row in json.loads(path.read_text())["measured"]} == {False, True}
    with Image.open(path.with_suffix(".png")) as picture:
        assert picture.width > 1000 and len(set(picture.convert("L").tobytes())) > 50
    config = compose([*TINY, folder])
    resolve_for_machine(config)
    assert config.balancer.cost == str(path)
