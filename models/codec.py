"""Pixels as latents: a patch of pixels is a token, without loss.

V tokens in (t, h, w) order, C = patch_time * patch * patch * 3 channels in (time, height, width, rgb) order.
"""

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class PixelCodec:
    """Patches of `patch` x `patch` pixels and `patch_time` frames."""

    patch: int
    patch_time: int

    @property
    def channels(self) -> int:
        return self.patch_time * self.patch * self.patch * 3

    def encode(self, pixels_VC: Tensor) -> Tensor:
        """uint8 patches -> float32 latents in [-1, 1]."""
        return pixels_VC.float() / 127.5 - 1

    def decode(self, latent_VC: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """Latents of a (t, h, w) grid -> [t * patch_time, h * patch, w * patch, 3] uint8 frames."""
        pixels_VC = ((latent_VC.float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        t, h, w = grid
        if pixels_VC.shape != (t * h * w, self.channels):
            raise ValueError(f"latents of shape {tuple(latent_VC.shape)} do not fill a grid of {grid}")
        return rearrange(
            pixels_VC,
            "(t h w) (pt ph pw rgb) -> (t pt) (h ph) (w pw) rgb",
            t=t,
            h=h,
            w=w,
            pt=self.patch_time,
            ph=self.patch,
            pw=self.patch,
        )
