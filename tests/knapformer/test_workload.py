"""The workload model: the paper's form, fits, files, and a bound that no plan beats."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from knapformer import WorkloadModel
from knapformer.workload import integer_units


def test_the_analytic_form_is_the_papers():
    cost = WorkloadModel.analytic(width=3072, gamma=0.49)
    length = 4096
    flop = 24 * length * 3072**2 + 0.49 * 4 * length**2 * 3072
    assert cost.work(length) == pytest.approx(flop)
    assert cost.work(length, 4) == pytest.approx(flop / 4)
    assert cost.seconds(length, 4) == cost.work(length, 4)  # FLOP know no traffic


def test_traffic_counts_the_rows_that_leave_and_where_they_go():
    cost = WorkloadModel(linear=1.0, quadratic=0.0, traffic=2.0, traffic_across=10.0, node=4)
    near = cost.seconds(80, 4) - cost.work(80, 4)
    assert near == pytest.approx(20 * 3 / 4 * 2)
    # Of 7 peers 3 are in the node and 4 outside.
    far = cost.seconds(80, 8) - cost.work(80, 8)
    assert far == pytest.approx(10 * (3 * 2 + 4 * 10) / 8)
    assert cost.seconds(80, 1) == cost.work(80, 1)


@given(st.integers(1, 10**6), st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]))
def test_even_shards_cost_together_what_the_sequence_costs(length, degree):
    cost = WorkloadModel(linear=3.0, quadratic=0.25)
    tokens = np.full(degree, length // degree) + (np.arange(degree) < length % degree)
    assert cost.chunk_work(tokens, length, degree).sum() == pytest.approx(float(cost.work(length)))


def test_a_fit_recovers_the_coefficients_it_was_measured_with():
    lens = np.array([256, 1024, 4096, 16384, 65536])
    fit = WorkloadModel.fit(lens, 3e-7 * lens + 2e-12 * lens**2)
    assert (fit.linear, fit.quadratic) == pytest.approx((3e-7, 2e-12))


def test_a_fit_never_has_negative_coefficients():
    lens = np.array([100, 1000, 10000])
    assert WorkloadModel.fit(lens, lens**0.9).quadratic == 0
    assert WorkloadModel.fit(lens, lens**2.2).linear == 0


STEPS = [(64, 1), (256, 2), (256, 4), (1024, 1), (1024, 4), (4096, 2), (4096, 1), (16384, 4)]
TOKENS, SQUARES = (np.array(x, float) for x in zip(*((n / g, n * n / g) for n, g in STEPS), strict=True))


def test_a_fit_of_steps_finds_what_they_cost_besides():
    fit, overhead = WorkloadModel.fit_steps(TOKENS, SQUARES, 0.02 + 3e-5 * TOKENS + 2e-8 * SQUARES)
    assert (fit.linear, fit.quadratic, overhead) == pytest.approx((3e-5, 2e-8, 0.02))


@given(st.integers(0, len(STEPS) - 1), st.floats(2, 50))
def test_a_disturbed_measurement_moves_no_fit(number, factor):
    seconds = 0.02 + 3e-5 * TOKENS + 2e-8 * SQUARES
    seconds[number] *= factor
    fit, overhead = WorkloadModel.fit_steps(TOKENS, SQUARES, seconds)
    modelled = overhead + fit.linear * TOKENS + fit.quadratic * SQUARES
    others = np.arange(len(STEPS)) != number
    assert np.median(np.abs(modelled / seconds - 1)[others]) < 0.02


def test_a_model_survives_its_file(tmp_path):
    cost = WorkloadModel(linear=1 / 3, quadratic=1e-13, traffic=0.1, traffic_across=0.7, node=4)
    cost.save(tmp_path / "cost.json")
    assert WorkloadModel.load(tmp_path / "cost.json") == cost


@pytest.mark.parametrize(
    "text", ["nonsense", "[1, 2]", '{"linear": 1}', '{"linear": 1, "quadratic": 0, "b": 2}']
)
def test_a_file_that_is_no_model_is_named(tmp_path, text):
    path = tmp_path / "cost.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"cost\.json"):
        WorkloadModel.load(path)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"linear": -1.0, "quadratic": 1.0}, "linear=-1.0"),
        ({"linear": 1.0, "quadratic": float("nan")}, "quadratic=nan"),
        ({"linear": 0.0, "quadratic": 0.0}, "both 0"),
        ({"linear": 1.0, "quadratic": 0.0, "node": 0}, "node=0"),
    ],
)
def test_coefficients_that_cannot_be_are_named(values, named):
    with pytest.raises(ValueError, match=named):
        WorkloadModel(**values)


def test_measurements_that_fit_nothing_are_refused():
    with pytest.raises(ValueError, match="2 different lengths"):
        WorkloadModel.fit([5, 5], [1.0, 2.0])
    with pytest.raises(ValueError, match="3 different steps"):
        WorkloadModel.fit_steps([5, 5, 6], [25, 25, 36], [1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match="positive seconds"):
        WorkloadModel.fit_steps([5, 6, 7], [25, 36, 49], [1.0, 2.0, 0.0])


def test_the_bound_is_the_mean_while_every_sequence_fits_whole():
    cost = WorkloadModel(linear=1.0, quadratic=0.0, traffic=1.0)
    assert cost.lower_bound([4, 4, 4, 4], 2, [1, 2]) == pytest.approx(8)


def test_the_bound_pays_for_the_splits_it_needs():
    # 100 tokens must be split over two ranks: 50 each, and half of those 50 leave: 25 a rank more.
    cost = WorkloadModel(linear=1.0, quadratic=0.0, traffic=1.0)
    assert cost.lower_bound([100], 2, [1, 2]) == pytest.approx(75)


def test_integer_units_keep_ratios_and_leave_room_for_sums():
    (units,) = integer_units(np.array([1.0, 2.0, 3.0]))
    assert units.tolist() == [units[0], 2 * units[0], 3 * units[0]]
    assert 2**39 <= units[2] <= 2**40
