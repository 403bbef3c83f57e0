"""What of a configuration the cluster model wants."""

import torch

from knapformer.cluster import Cluster, ModelShape
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


def shape_of(config: Config) -> ModelShape:
    """The sizes of config.model as this program trains it: raw patches and positions are what is routed.

    parallel.dtype=auto is float32 on cluster=cpu and bfloat16 elsewhere.
    """
    model, dtype = config.model, config.parallel.dtype
    with torch.device("meta"):
        parameters = sum(p.numel() for p in build_denoiser(model, config.data.channels).parameters())
    wide = dtype == "float32" or (dtype == "auto" and config.cluster.name == "cpu")
    return ModelShape(
        width=model.width,
        heads=model.heads,
        blocks=model.double_blocks + model.single_blocks if model.arch == "mmdit" else model.blocks,
        parameters=parameters,
        mlp_ratio=model.mlp_ratio,
        recompute=config.parallel.activation_checkpointing,
        element_bytes=4 if wide else 2,
        routed_bytes=config.data.channels + 3 * 4,  # uint8 patches, int32 positions
    )
