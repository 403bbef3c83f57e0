"""Clusters by name, what a configuration says of its model, and which cost plans."""

import copy
from pathlib import Path
from typing import Any

import pytest

from knapformer import WorkloadModel
from knapformer.cluster import Cluster, ModelShape
from knapformer_cli.calibration import Calibration, device_name, file_name, subject_of
from knapformer_cli.config import compose
from knapformer_cli.cost import cluster_of, load_cost, resolve_for_cluster, resolve_for_machine, shape_of
from knapformer_cli.schema import Config


def test_the_library_and_the_preset_agree_on_the_h100() -> None:
    assert cluster_of(compose(["cluster=h100"]).cluster, 32) == Cluster()


def test_the_library_and_the_preset_agree_on_flux() -> None:
    config = compose(
        ["model=flux", "data=shards", "experiment=none", "parallel=fsdp_checkpointed", "cluster=h100"]
    )
    shape, flux = shape_of(config), ModelShape()
    assert shape.parameters == pytest.approx(flux.parameters, rel=0.02)
    assert (shape.linear_flop, shape.passes, shape.exchanged_bytes, shape.token_bytes) == (
        flux.linear_flop,
        flux.passes,
        flux.exchanged_bytes,
        flux.token_bytes,
    )


@pytest.mark.parametrize("name", ["h100", "h200", "b200", "a100", "cpu"])
def test_every_number_of_a_cluster_can_be_overridden(name: str) -> None:
    cluster = cluster_of(compose([f"cluster={name}", "cluster.bandwidth=7", "cluster.node=4"]).cluster, 64)
    assert (cluster.ranks, cluster.node, cluster.bandwidth) == (64, 4, 7e9)


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("cluster=v9000", "cluster=v9000 is no choice; use one of a100, b200, cpu, h100, h200"),
        ("cluster.bandwidth=-1", "cluster.bandwidth is -1.0; it must be greater than 0"),
        ("cluster.peak_tflops=0", "cluster.peak_tflops is 0.0; it must be greater than 0"),
        ("cluster.node=0", "cluster.node is 0; it must be greater than 0"),
        ("cluster.latency_us=nan", "cluster.latency_us is nan"),
        ("cluster.overlap=1.5", "cluster.overlap is 1.5; it must lie between 0 and 1"),
        ("cluster.bandwith=1", "cluster.bandwith is no key"),
    ],
)
def test_a_cluster_that_cannot_be_is_named(override: str, named: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        compose([override])
    assert named in str(caught.value)


COST = WorkloadModel(linear=1e-4, quadratic=1e-7)


@pytest.fixture(scope="module")
def base() -> Config:
    """The defaults on this machine's CPU."""
    return compose(["launch.device=cpu", "experiment=none"])


def changed(base: Config, **settings: Any) -> Config:
    """A copy with other settings; a__b is a.b. Composing anew would take a second each time."""
    config = copy.deepcopy(base)
    for name, value in settings.items():
        node: Any = config
        *groups, last = name.split("__")
        for group in groups:
            node = getattr(node, group)
        setattr(node, last, value)
    return config


def write(folder: Path, config: Config, device: str = "", overhead: float = 0.01) -> Path:
    """A calibration of the configuration, by default on this machine, as `calibrate` would save it."""
    calibration = Calibration(
        device=device or device_name("cpu", 1),
        subject=subject_of(config, "float32"),
        kernel="sdpa",
        cost=COST,
        overhead=overhead,
        gamma=0.7,
        held_out_error=0.05,
        gamma_error=0.2,
        longest=2048,
        date="2026-11-29",
        torch="2.13.0",
    )
    path = folder / file_name(calibration.device, calibration.subject)
    calibration.save(path, [])
    return path


def resolved(base: Config, folder: Path, **settings: Any) -> str:
    config = changed(base, calibrate__folder=str(folder), **settings)
    resolve_for_machine(config)
    return config.balancer.cost


def test_a_calibration_survives_its_file(base: Config, tmp_path: Path) -> None:
    found = Calibration.load(write(tmp_path, base, overhead=1 / 3))
    assert (found.overhead, found.cost, found.device) == (1 / 3, COST, device_name("cpu", 1))
    again = tmp_path / "again.json"
    found.save(again, [{"chunks": [[64, 1]], "held_out": False, "seconds": 0.1}])
    assert Calibration.load(again) == found


OTHERS = [
    {"parallel__dtype": "bfloat16"},
    {"parallel__threads": 2},
    {"parallel__activation_checkpointing": True},
    {"model__text__layers": 3},
    {"model__width": 256},
    {"data__patch": 4},
    {"balancer__kernel": "sdpa"},
]


@pytest.mark.parametrize("other", OTHERS)
def test_auto_takes_the_calibration_of_this_very_model_device_and_dtype(
    base: Config, tmp_path: Path, other: dict[str, Any]
) -> None:
    assert resolved(base, tmp_path) == "analytic"
    path = write(tmp_path, base)
    assert resolved(base, tmp_path) == str(path)
    assert resolved(base, tmp_path, **other) == "analytic"
    assert resolved(base, tmp_path, balancer__cost="analytic") == "analytic"


def test_a_resolved_cost_is_what_plans(base: Config, tmp_path: Path) -> None:
    assert load_cost(changed(base, balancer__cost=str(write(tmp_path, base))), 2)[0] == COST
    paper = WorkloadModel.analytic(base.model.width, base.balancer.gamma)
    assert load_cost(changed(base, balancer__cost="analytic"), 2)[0] == paper
    modelled = cluster_of(base.cluster, 32).workload(shape_of(base))
    assert load_cost(changed(base, balancer__cost="cluster"), 32)[0] == modelled


def test_a_calibration_counts_for_the_cluster_of_its_device(base: Config, tmp_path: Path) -> None:
    wide = changed(base, parallel__dtype="float32", calibrate__folder=str(tmp_path))
    path = write(tmp_path, wide, device="NVIDIA H100 80GB HBM3")
    h100, h200 = (changed(wide, cluster__name=name) for name in ("h100", "h200"))
    found = resolve_for_cluster(h100)
    assert found is not None and h100.balancer.cost == str(path)
    cost, _ = load_cost(h100, 32)
    assert (cost.linear, cost.quadratic) == (COST.linear, COST.quadratic)
    assert cost.traffic == cluster_of(h100.cluster, 32).workload(shape_of(h100)).traffic > 0
    assert resolve_for_cluster(h200) is None and h200.balancer.cost == "analytic"
    with pytest.raises(ValueError, match="device NVIDIA H100 80GB HBM3, not h200"):
        resolve_for_cluster(changed(h200, balancer__cost=str(path)))


DAMAGE = {
    "": "is no calibration",
    "[1]": "no coefficients under cost",
    '{"cost": {}}': "'device' is missing",
    '"linear": 0.0001': "finite number",
    '"quadratic": 1e-07': "cost.quadratic is 'x', no number",
    '"overhead": 0.01': "overhead is 'x', no number",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_calibration_is_named(base: Config, tmp_path: Path, damage: str) -> None:
    path = write(tmp_path, base)
    whole = path.read_text()
    key = damage.split(":")[0]
    broken = {'"linear"': "NaN", '"quadratic"': '"x"', '"overhead"': '"x"'}.get(key)
    path.write_text(whole.replace(damage, f"{key}: {broken}") if broken else damage)
    for name in ("auto", str(path)):
        with pytest.raises(ValueError, match=r"float32\.json") as caught:
            resolved(base, tmp_path, balancer__cost=name)
        assert DAMAGE[damage] in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"model__width": 256}, "model.width=128, not 256"),
        ({"parallel__dtype": "bfloat16"}, "parallel.dtype=float32, not bfloat16"),
        ({"parallel__threads": 2}, "1 thread, not cpu"),
    ],
)
def test_a_calibration_of_something_else_is_refused_by_name(
    base: Config, tmp_path: Path, other: dict[str, Any], named: str
) -> None:
    path = write(tmp_path, base)
    with pytest.raises(ValueError, match=r"run knapformer calibrate with this configuration") as caught:
        resolved(base, tmp_path, balancer__cost=str(path), **other)
    assert named in str(caught.value)


def test_a_cost_that_is_nothing_is_named(base: Config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"balancer\.cost is 'anlytic'; it must be auto, analytic, cluster"):
        resolved(base, tmp_path, balancer__cost="anlytic")
