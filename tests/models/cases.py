"""Random batches and randomly initialised models for the tests."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from models.config import ModelConfig, TextConfig
from models.tokens import Tokens, pack_whole

CHANNELS = 12

Grid = tuple[int, int, int]


def small_config(**changes: object) -> ModelConfig:
    """Two blocks of each kind, width 32."""
    text = TextConfig(width=16, heads=2, layers=2, max_bytes=40, features=20, pooled=12)
    fields: dict = {
        "width": 32,
        "heads": 4,
        "double_blocks": 2,
        "single_blocks": 2,
        "blocks": 2,
        "text": text,
    }
    return ModelConfig(**{**fields, "rope_axes": [2, 2, 4], **changes})


def randomise(model: nn.Module, seed: int = 0, std: float = 0.15) -> nn.Module:
    """No parameter zero, so that no path is cut."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    return model


def batch(cases: Sequence[tuple[Grid, bytes]], seed: int = 0) -> tuple[Tokens, list[int]]:
    """Sequences of random latents with the given grids and captions."""
    generator = torch.Generator().manual_seed(seed)
    latents = [torch.randn(t * h * w, CHANNELS, generator=generator) for (t, h, w), _ in cases]
    times = torch.rand(len(cases), generator=generator)
    return pack_whole(
        latents, [grid for grid, _ in cases], [caption for _, caption in cases], times, CHANNELS
    )


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    """Gradients of every parameter, None where there is none."""
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}
