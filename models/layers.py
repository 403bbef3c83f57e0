"""Layers that both transformers share.

S sequences, T tokens, D width, H heads, K head size.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.rope import rotary_table, rotate, sincos_table
from models.tokens import Attend, Tokens


def local_attend(lengths: Sequence[int]) -> Attend:
    """Each sequence of a packed batch attends to itself, on one process: the reference attention."""

    def attend(q_THK: Tensor, k_THK: Tensor, v_THK: Tensor) -> Tensor:
        if not sum(lengths):
            return q_THK + k_THK + v_THK  # no rows; keeps all three in the graph
        parts = (x.transpose(0, 1).split(list(lengths), 1) for x in (q_THK, k_THK, v_THK))
        outs = [
            F.scaled_dot_product_attention(*(x[None] for x in qkv))[0] for qkv in zip(*parts, strict=True)
        ]
        return torch.cat(outs, 1).transpose(0, 1)

    return attend


@dataclass(frozen=True, eq=False)
class Packing:
    """Where a step's tokens lie and which way they turn: what every block needs beside its rows."""

    sequence_T: Tensor
    sequence_W: Tensor
    sequence_V: Tensor
    place_T: Tensor  # place of each row of (all text, all visual) among the T
    order_T: Tensor  # row of (all text, all visual) at each place: the inverse
    rotary_TP: Tensor

    @staticmethod
    def of(tokens: Tokens, axes: Sequence[int], theta: float) -> "Packing":
        place_T = torch.cat((tokens.place_W, tokens.place_V))
        order_T = torch.empty_like(place_T)
        order_T[place_T] = torch.arange(len(place_T), device=place_T.device)
        return Packing(
            sequence_T=tokens.sequence_T,
            sequence_W=tokens.sequence_T[tokens.place_W],
            sequence_V=tokens.sequence_T[tokens.place_V],
            place_T=place_T,
            order_T=order_T,
            rotary_TP=rotary_table(tokens.position_T3, axes, theta),
        )

    def pack(self, text_W: Tensor, visual_V: Tensor) -> Tensor:
        """Rows of both streams -> rows in the order of the tokens."""
        return _Permute.apply(torch.cat((text_W, visual_V)), self.order_T, self.place_T)

    def unpack(self, x_T: Tensor) -> tuple[Tensor, Tensor]:
        """Rows in the order of the tokens -> rows of the text stream, rows of the visual stream."""
        n_text = len(self.sequence_W)
        x_T = _Permute.apply(x_T, self.place_T, self.order_T)
        return x_T[:n_text], x_T[n_text:]


class _Permute(torch.autograd.Function):
    """Rows by a permutation; backward gathers by the inverse, where index_select would add atomically."""

    @staticmethod
    def forward(ctx, x_T: Tensor, order_T: Tensor, inverse_T: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_T)
        return x_T.index_select(0, order_T)

    @staticmethod
    def backward(ctx, grad_T: Tensor) -> tuple[Tensor, None, None]:
        (inverse_T,) = ctx.saved_tensors
        return grad_T.index_select(0, inverse_T), None, None


class DoorLinear(nn.Linear):
    """A linear layer that takes any float dtype: where mixed precision's parameters meet outer tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class LatentIn(DoorLinear):
    """Latents -> visual rows, with their absolute positions where the model has them."""

    def __init__(self, channels: int, config: ModelConfig):
        super().__init__(channels, config.width)
        self.theta = config.rope_theta if config.absolute else None

    def embed(self, tokens: Tokens) -> Tensor:
        """[V, D]."""
        rows_VD = self(tokens.latent_VC)
        if self.theta is None:
            return rows_VD
        position_V3 = tokens.position_T3.index_select(0, tokens.place_V)
        return rows_VD + sincos_table(position_V3, rows_VD.shape[1], self.theta).to(rows_VD.dtype)


class TimeEmbedding(nn.Module):
    """A number in [0, 1] -> [D]: cosines and sines of 256 frequencies of its thousandfold, then an MLP."""

    def __init__(self, width: int, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.mlp = nn.Sequential(DoorLinear(frequencies, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, time_S: Tensor) -> Tensor:
        half = self.frequencies // 2
        frequency = torch.exp(-math.log(10000) / half * torch.arange(half, device=time_S.device))
        angle = 1000 * time_S.float()[:, None] * frequency
        return self.mlp(torch.cat((angle.cos(), angle.sin()), 1))


class Conditioning(nn.Module):
    """What modulates every block: [S, D], activated, from flow time, pooled caption and guidance."""

    def __init__(self, width: int, pooled: int, guidance: bool = False):
        super().__init__()
        self.time = TimeEmbedding(width)
        self.pooled = nn.Sequential(DoorLinear(pooled, width), nn.SiLU(), nn.Linear(width, width))
        self.guidance = TimeEmbedding(width) if guidance else None

    def forward(self, time_S: Tensor, pooled_SP: Tensor, guidance_S: Tensor | None = None) -> Tensor:
        cond_SD = self.time(time_S) + self.pooled(pooled_SP)
        if self.guidance is not None:
            assert guidance_S is not None, "a model with guidance_embed needs guidance_S"
            cond_SD = cond_SD + self.guidance(guidance_S)
        return F.silu(cond_SD)


class Modulation(nn.Module):
    """adaLN (Peebles and Xie, arXiv 2212.09748): `parts` vectors a sequence, zero at the start."""

    def __init__(self, width: int, parts: int):
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(width, parts * width)

    def forward(self, cond_SD: Tensor) -> tuple[Tensor, ...]:
        return self.linear(cond_SD).chunk(self.parts, 1)


def norm_modulate(x_TD: Tensor, shift_SD: Tensor, scale_SD: Tensor, sequence_T: Tensor) -> Tensor:
    """Layer norm, then each sequence's own scale and shift."""
    x_TD = F.layer_norm(x_TD, x_TD.shape[1:], eps=1e-6)
    return torch.addcmul(
        shift_SD.index_select(0, sequence_T), x_TD, (1 + scale_SD).index_select(0, sequence_T)
    )


def add_gated(x_TD: Tensor, gate_SD: Tensor, y_TD: Tensor, sequence_T: Tensor) -> Tensor:
    """x + gate * y with each sequence's own gate."""
    return torch.addcmul(x_TD, gate_SD.index_select(0, sequence_T), y_TD)


class QKNorm(nn.Module):
    """RMS norm of queries and keys over the head (Dehghani et al., arXiv 2302.05442)."""

    def __init__(self, head_size: int):
        super().__init__()
        self.q = nn.RMSNorm(head_size, eps=1e-6)
        self.k = nn.RMSNorm(head_size, eps=1e-6)

    def forward(self, q_THK: Tensor, k_THK: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(q_THK), self.k(k_THK)


class Stream(nn.Module):
    """One stream's weights of a transformer block, to run before and after attention."""

    def __init__(self, width: int, heads: int, mlp_ratio: float):
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.heads = heads
        self.modulation = Modulation(width, 6)
        self.qkv = nn.Linear(width, 3 * width)
        self.qk_norm = QKNorm(width // heads)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU("tanh"), nn.Linear(hidden, width))

    def before(
        self, x_TD: Tensor, mod: tuple[Tensor, ...], sequence_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rows -> q, k, v, each [T, H, K]."""
        qkv = self.qkv(norm_modulate(x_TD, mod[0], mod[1], sequence_T))
        q, k, v = qkv.unflatten(1, (3, self.heads, -1)).unbind(1)
        return *self.qk_norm(q, k), v

    def after(self, x_TD: Tensor, out_THK: Tensor, mod: tuple[Tensor, ...], sequence_T: Tensor) -> Tensor:
        """Rows and what attention made of them -> the block's rows."""
        x_TD = add_gated(x_TD, mod[2], self.out(out_THK.flatten(1)), sequence_T)
        return add_gated(x_TD, mod[5], self.mlp(norm_modulate(x_TD, mod[3], mod[4], sequence_T)), sequence_T)


def attend_rotated(q: Tensor, k: Tensor, v: Tensor, packing: Packing, attend: Attend) -> Tensor:
    """Attention over packed tokens with rotary positions: three times [T, H, K] -> [T, H, K]."""
    return attend(rotate(q, packing.rotary_TP), rotate(k, packing.rotary_TP), v)


class FinalLayer(nn.Module):
    """Modulated layer norm and projection to latent channels, zero at the start of training; float32 out."""

    def __init__(self, width: int, channels: int):
        super().__init__()
        self.modulation = Modulation(width, 2)
        self.linear = nn.Linear(width, channels)

    def forward(self, x_VD: Tensor, cond_SD: Tensor, sequence_V: Tensor) -> Tensor:
        scale_SD, shift_SD = self.modulation(cond_SD)  # the order in FLUX's published weights
        return self.linear(norm_modulate(x_VD, shift_SD, scale_SD, sequence_V)).float()
