"""Positions over three axes: rotary (Su et al., arXiv 2104.09864, as FLUX applies it) and absolute.

T tokens, H heads, K head size; neighbouring channels 2i and 2i+1 of a head are rotated together.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def rotary_table(position_T3: Tensor, axes: Sequence[int], theta: float) -> Tensor:
    """[T, K/2] complex64 of length one: each pair's angle; axes are the head's parts for t, h and w."""
    angles = []
    for axis, position_T in zip(axes, position_T3.unbind(1), strict=True):
        # float32 angles lose three digits at positions in the thousands.
        pair = torch.arange(0, axis, 2, dtype=torch.float64, device=position_T.device)
        angles.append(position_T[:, None] * theta ** (-pair / max(axis, 1)))
    angle_TP = torch.cat(angles, 1)
    return torch.complex(angle_TP.cos().float(), angle_TP.sin().float())


def rotate(x_THK: Tensor, rotary_TP: Tensor) -> Tensor:
    """Turn each pair of channels by its token's angles, in float32; the result has x's dtype.

    One complex product: on a CPU four times as fast as the same in real numbers.
    """
    pairs_THP = torch.view_as_complex(x_THK.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs_THP * rotary_TP[:, None]).flatten(-2).to(x_THK.dtype)


def sincos_table(position_V3: Tensor, width: int, theta: float) -> Tensor:
    """[V, width] float32: sines, then cosines, of each of t, h and w at falling frequencies (Peebles and Xie,
    arXiv 2212.09748); channels that do not divide into them stay zero."""
    pairs = width // 6
    frequency_P = theta ** (-torch.arange(pairs, device=position_V3.device) / max(pairs, 1))
    angle_VP = (position_V3.float()[:, :, None] * frequency_P).flatten(1)
    table_VD = torch.cat((angle_VP.sin(), angle_VP.cos()), 1)
    return F.pad(table_VD, (0, width - table_VD.shape[1]))
