"""Presets are model configurations, and what cannot be built is refused in words."""

from pathlib import Path

import pytest
import torch
from diffusers import FluxTransformer2DModel
from omegaconf import OmegaConf

import conf
from models.config import ModelConfig
from models.convert import diffusers_config
from models.denoiser import build_denoiser
from tests.models.cases import CHANNELS, small_config

PRESETS = sorted(Path(next(iter(conf.__path__)), "model").glob("*.yaml"))


def load(path: Path) -> ModelConfig:
    merged = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.load(path))
    config = OmegaConf.to_object(merged)
    assert isinstance(config, ModelConfig)
    return config


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_builds_without_memory(path):
    with torch.device("meta"):
        model = build_denoiser(load(path), 64)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not list(model.buffers())


def test_tiny_has_one_to_two_million_parameters():
    tiny = next(path for path in PRESETS if path.stem == "tiny")
    with torch.device("meta"):
        assert 1e6 < count(build_denoiser(load(tiny), CHANNELS)) < 2e6


def test_flux_has_the_parameters_of_flux():
    flux = load(next(path for path in PRESETS if path.stem == "flux"))
    with torch.device("meta"):
        ours, theirs = build_denoiser(flux, 64).core, FluxTransformer2DModel()
    theirs_config = {**theirs.config, "axes_dims_rope": list(theirs.config.axes_dims_rope)}
    assert all(theirs_config[name] == value for name, value in diffusers_config(flux, 64).items())
    assert count(ours) == count(theirs) == 11_891_178_560


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"arch": "unet"}, "model.arch=unet is not one of mmdit, dit"),
        ({"width": 30}, "model.width=30 is not a multiple of model.heads=4"),
        ({"heads": 0}, "model.heads=0 must be at least 1"),
        ({"single_blocks": -1}, "model.single_blocks=-1 must not be negative"),
        ({"rope_axes": [2, 2, 2]}, r"rope_axes=\[2, 2, 2\] must add up to the head size, width/heads=8"),
        ({"rope_axes": [4, 4]}, r"rope_axes=\[4, 4\] must be three even numbers"),
        ({"rope_axes": [1, 3, 4]}, r"rope_axes=\[1, 3, 4\] must be three even numbers"),
        ({"mlp_ratio": 0.0}, "model.mlp_ratio=0.0"),
        ({"arch": "dit", "guidance_embed": True}, "needs model.arch=mmdit"),
    ],
)
def test_a_model_that_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        build_denoiser(small_config(**changes), CHANNELS)


def test_text_widths_and_channels_are_checked_too():
    config = small_config()
    config.text.heads = 3
    with pytest.raises(ValueError, match=r"model\.text\.width=16 is not a multiple of model.text.heads=3"):
        build_denoiser(config, CHANNELS)
    with pytest.raises(ValueError, match="0 latent channels"):
        build_denoiser(small_config(), 0)
