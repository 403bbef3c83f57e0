"""Which cost plans: `balancer.cost` resolved to a calibration, the paper's form or a modelled cluster.

Also what of a configuration the cluster model wants.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

from knapformer import WorkloadModel
from knapformer.cluster import Cluster, ModelShape
from knapformer_cli.calibration import Calibration, device_name, find_calibration, subject_of
from knapformer_cli.schema import ClusterConfig, Config
from models.denoiser import build_denoiser


def cluster_of(config: ClusterConfig, ranks: int) -> Cluster:
    """The cluster of `cluster=NAME` with `ranks` devices, in bytes, FLOP and seconds."""
    return Cluster(
        ranks=ranks,
        node=config.node,
        peak_flops=config.peak_tflops * 1e12,
        memory=config.memory_gib * 2**30,
        memory_bandwidth=config.memory_bandwidth * 1e9,
        bandwidth=config.bandwidth * 1e9,
        bandwidth_across=config.bandwidth_across * 1e9,
        latency=config.latency_us / 1e6,
        linear_efficiency=config.linear_efficiency,
        attention_efficiency=config.attention_efficiency,
        overlap=config.overlap,
    )


class Undrawn(TorchFunctionMode):
    """Modules are built without drawing weights, for which `meta` would import a compiler, for seconds."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__module__", None) == "torch.nn.init":
            return None
        return func(*args, **(kwargs or {}))


def shape_of(config: Config) -> ModelShape:
    """The sizes of config.model as this program trains it: raw patches and positions are what is routed."""
    model = config.model
    with torch.device("meta"), Undrawn():
        parameters = sum(p.numel() for p in build_denoiser(model, config.data.channels).parameters())
    return ModelShape(
        width=model.width,
        heads=model.heads,
        blocks=model.depth,
        parameters=parameters,
        mlp_ratio=model.mlp_ratio,
        recompute=config.parallel.activation_checkpointing,
        element_bytes=4 if _dtype_on(config, config.cluster.name) == "float32" else 2,
        routed_bytes=config.data.channels + 3 * 4,  # uint8 patches, int32 positions
    )


def resolve_for_machine(config: Config) -> Calibration | None:
    """Settle balancer.cost for training here: `auto` becomes the path of a calibration, or `analytic`.

    launch.device must be settled. ValueError for a file that is damaged, of another model or device.
    """
    device, threads = config.launch.device, config.parallel.threads

    @cache  # the name of a GPU costs a process
    def here() -> str:
        return device_name(device, threads)

    return _resolve(config, device, lambda name: name == here(), here)


def resolve_for_cluster(config: Config) -> Calibration | None:
    """The same for config.cluster, which need not be at hand: what was measured on such a device counts."""
    cluster = config.cluster.name
    return _resolve(config, cluster, lambda name: _is_of(cluster, name), lambda: cluster)


def _resolve(
    config: Config, device: str, on: Callable[[str], bool], wanted: Callable[[], str]
) -> Calibration | None:
    name, subject = config.balancer.cost, subject_of(config, _dtype_on(config, device))
    if name in ("analytic", "cluster"):
        return None
    if name == "auto":
        found = find_calibration(Path(config.calibrate.folder), subject, on)
        config.balancer.cost = str(found[0].resolve()) if found else "analytic"
        return found[1] if found else None
    path = Path(name).resolve()
    if not path.is_file():
        raise ValueError(
            f"balancer.cost is {name!r}; it must be auto, analytic, cluster or a file of knapformer calibrate"
        )
    calibration = Calibration.load(path)
    difference = calibration.difference(subject)
    if difference is None and not on(calibration.device):
        difference = f"device {calibration.device}, not {wanted()}"
    if difference:
        raise ValueError(
            f"balancer.cost={name} was measured with {difference}; run knapformer calibrate with this "
            "configuration, or use balancer.cost=analytic"
        )
    config.balancer.cost = str(path)
    return calibration


def load_cost(config: Config, ranks: int) -> tuple[WorkloadModel, str]:
    """The cost that a resolved balancer.cost names, and what it is in words."""
    name, gamma = config.balancer.cost, config.balancer.gamma
    if name == "analytic":
        return WorkloadModel.analytic(config.model.width, gamma), f"the analytic cost, gamma {gamma:g}"
    modelled = cluster_of(config.cluster, ranks).workload(shape_of(config))
    if name == "cluster":
        return modelled, f"the modelled seconds of cluster={config.cluster.name}"
    return _with_traffic(Calibration.load(Path(name)), modelled, config), f"the calibration {name}"


def _with_traffic(calibration: Calibration, modelled: WorkloadModel, config: Config) -> WorkloadModel:
    """A calibration is of one device and knows no traffic: that of a cluster of such devices is added."""
    if not _is_of(config.cluster.name, calibration.device):
        return calibration.cost
    traffic = {name: getattr(modelled, name) for name in ("traffic", "traffic_across", "node")}
    return replace(calibration.cost, **traffic)


def _is_of(cluster: str, device: str) -> bool:
    """Whether a device belongs to a cluster called so: h100 is in NVIDIA H100 80GB HBM3."""
    return cluster.lower() in re.findall(r"[a-z0-9]+", device.lower())


def _dtype_on(config: Config, device: str) -> str:
    """The name of the dtype of compute there; a cluster that is not cpu is of GPUs."""
    return config.parallel.dtype_on("cpu" if device == "cpu" else "cuda")
