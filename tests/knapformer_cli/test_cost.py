"""Clusters by name, and what a configuration says of its model."""

import pytest

from knapformer.cluster import Cluster, ModelShape
from knapformer_cli.config import compose
from knapformer_cli.cost import cluster_of, shape_of


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
