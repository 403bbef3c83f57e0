"""Weights to and from diffusers' FluxTransformer2DModel, as state dicts and as safetensors folders.

Both hold the same numbers; ours keeps projections of one input in one matrix, stacked in the order below.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.config import ModelConfig

WEIGHTS = "diffusion_pytorch_model"

_TOP = {
    "latent_in": ["x_embedder"],
    "text_in": ["context_embedder"],
    "conditioning.pooled.0": ["time_text_embed.text_embedder.linear_1"],
    "conditioning.pooled.2": ["time_text_embed.text_embedder.linear_2"],
    "conditioning.time.mlp.0": ["time_text_embed.timestep_embedder.linear_1"],
    "conditioning.time.mlp.2": ["time_text_embed.timestep_embedder.linear_2"],
    "conditioning.guidance.mlp.0": ["time_text_embed.guidance_embedder.linear_1"],
    "conditioning.guidance.mlp.2": ["time_text_embed.guidance_embedder.linear_2"],
    "final.modulation.linear": ["norm_out.linear"],
    "final.linear": ["proj_out"],
}
_DOUBLE = {
    "visual.modulation.linear": ["norm1.linear"],
    "visual.qkv": ["attn.to_q", "attn.to_k", "attn.to_v"],
    "visual.qk_norm.q": ["attn.norm_q"],
    "visual.qk_norm.k": ["attn.norm_k"],
    "visual.out": ["attn.to_out.0"],
    "visual.mlp.0": ["ff.net.0.proj"],
    "visual.mlp.2": ["ff.net.2"],
    "text.modulation.linear": ["norm1_context.linear"],
    "text.qkv": ["attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"],
    "text.qk_norm.q": ["attn.norm_added_q"],
    "text.qk_norm.k": ["attn.norm_added_k"],
    "text.out": ["attn.to_add_out"],
    "text.mlp.0": ["ff_context.net.0.proj"],
    "text.mlp.2": ["ff_context.net.2"],
}
_SINGLE = {
    "modulation.linear": ["norm.linear"],
    "qkv_mlp": ["attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"],
    "qk_norm.q": ["attn.norm_q"],
    "qk_norm.k": ["attn.norm_k"],
    "out": ["proj_out"],
}


def to_diffusers(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict of an MMDiT -> that of diffusers' model; ValueError for keys that are not an MMDiT's."""
    out: dict[str, Tensor] = {}
    left = dict(state)
    for ours, theirs in _pairs(config):
        if ours not in left:
            raise ValueError(f"{ours} is missing from the MMDiT's weights")
        rows = _rows(len(theirs), config)
        parts = left.pop(ours).split(rows) if rows else (left.pop(ours),)
        out.update((name, part.clone()) for name, part in zip(theirs, parts, strict=True))
    _refuse(left)
    return out


def from_diffusers(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict of diffusers' model -> that of an MMDiT; ValueError for keys that are not its."""
    out: dict[str, Tensor] = {}
    left = dict(state)
    for ours, theirs in _pairs(config):
        if missing := [name for name in theirs if name not in left]:
            raise ValueError(f"{missing[0]} is missing from diffusers' weights")
        parts = [left.pop(name) for name in theirs]
        out[ours] = torch.cat(parts) if len(parts) > 1 else parts[0]
    _refuse(left)
    return out


def diffusers_config(config: ModelConfig, channels: int) -> dict[str, object]:
    """The arguments of diffusers' FluxTransformer2DModel; ValueError where it has no such model."""
    if config.arch != "mmdit" or config.mlp_ratio != 4 or config.rope_theta != 10000:
        raise ValueError("only arch=mmdit with mlp_ratio=4 and rope_theta=10000 is a FluxTransformer2DModel")
    return {
        "patch_size": 1,
        "in_channels": channels,
        "num_layers": config.double_blocks,
        "num_single_layers": config.single_blocks,
        "attention_head_dim": config.head_size,
        "num_attention_heads": config.heads,
        "joint_attention_dim": config.text.features,
        "pooled_projection_dim": config.text.pooled,
        "guidance_embeds": config.guidance_embed,
        "axes_dims_rope": list(config.rope_axes),
    }


def load_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file, of an index of sharded ones, or of a folder with either.

    ValueError if there is none, or if a shard lacks what the index says it holds.
    """
    if path.is_dir():
        found = sorted(path.glob("*.safetensors.index.json")) or sorted(path.glob("*.safetensors"))
        if len(found) != 1:
            raise ValueError(
                f"{path} holds {len(found)} safetensors files without an index; name one of them"
            )
        path = found[0]
    if path.suffix != ".json":
        return load_file(path)
    shard_of = json.loads(path.read_text())["weight_map"]
    out: dict[str, Tensor] = {}
    for shard in sorted(set(shard_of.values())):
        with safe_open(path.parent / shard, "pt") as file:
            held = set(file.keys())
            for name in (name for name, where in shard_of.items() if where == shard):
                if name not in held:
                    raise ValueError(f"{path.parent / shard} lacks {name}, which {path.name} says it holds")
                out[name] = file.get_tensor(name)
    return out


def save_diffusers(
    state: Mapping[str, Tensor],
    folder: Path,
    config: ModelConfig,
    channels: int,
    shard_bytes: int = 5 * 2**30,
) -> None:
    """Write an MMDiT's state dict as a folder that diffusers' `from_pretrained` reads, in shards if large."""
    arguments = {"_class_name": "FluxTransformer2DModel", **diffusers_config(config, channels)}
    weights = to_diffusers(state, config)
    shards = list(_shards(weights, shard_bytes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(arguments, indent=2) + "\n")
    if len(shards) == 1:
        save_file(shards[0], folder / f"{WEIGHTS}.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = f"{WEIGHTS}-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
    index = {"metadata": {"total_size": sum(x.nbytes for x in weights.values())}, "weight_map": weight_map}
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _pairs(config: ModelConfig) -> Iterator[tuple[str, list[str]]]:
    """Every parameter of an MMDiT with diffusers' names for its parts."""
    layers = {
        ours: theirs for ours, theirs in _TOP.items() if config.guidance_embed or "guidance" not in ours
    }
    for ours_list, theirs_list, table, depth in (
        ("double_blocks", "transformer_blocks", _DOUBLE, config.double_blocks),
        ("single_blocks", "single_transformer_blocks", _SINGLE, config.single_blocks),
    ):
        for i in range(depth):
            for ours, theirs in table.items():
                layers[f"{ours_list}.{i}.{ours}"] = [f"{theirs_list}.{i}.{name}" for name in theirs]
    for ours, theirs in layers.items():
        for kind in ("weight",) if re.search(r"qk_norm\.[qk]$", ours) else ("weight", "bias"):
            yield f"{ours}.{kind}", [f"{name}.{kind}" for name in theirs]


def _rows(parts: int, config: ModelConfig) -> list[int]:
    """Rows of each part of a stacked matrix; empty for one that is not stacked."""
    hidden = int(config.width * config.mlp_ratio)
    return {1: [], 3: [config.width] * 3, 4: [config.width] * 3 + [hidden]}[parts]


def _shards(weights: Mapping[str, Tensor], limit: int) -> Iterator[dict[str, Tensor]]:
    """Consecutive tensors of at most `limit` bytes together, or one that alone is larger."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.contiguous()
        size += tensor.nbytes
    yield shard


def _refuse(left: Mapping[str, Tensor]) -> None:
    if left:
        raise ValueError(f"{next(iter(left))} is one of {len(left)} weights that the model does not have")
