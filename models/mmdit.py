"""FLUX's transformer over packed tokens: two-stream blocks, then one-stream blocks.

The two-stream block is the MMDiT of Esser et al. (arXiv 2403.03206); the parallel block with one fused
projection follows Dehghani et al. (arXiv 2302.05442). S sequences, W text and V visual tokens, T of both,
D width, E text features, P pooled width, C channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config import ModelConfig
from models.layers import (
    Conditioning,
    DoorLinear,
    FinalLayer,
    LatentIn,
    Modulation,
    Packing,
    QKNorm,
    Stream,
    add_gated,
    attend_rotated,
    norm_modulate,
)
from models.tokens import Attend, Tokens


class DoubleBlock(nn.Module):
    """Text and visual rows with weights of their own, joined in one attention."""

    def __init__(self, width: int, heads: int, mlp_ratio: float):
        super().__init__()
        self.text = Stream(width, heads, mlp_ratio)
        self.visual = Stream(width, heads, mlp_ratio)

    def forward(
        self, text_WD: Tensor, visual_VD: Tensor, cond_SD: Tensor, packing: Packing, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        text_mod, visual_mod = self.text.modulation(cond_SD), self.visual.modulation(cond_SD)
        text_qkv = self.text.before(text_WD, text_mod, packing.sequence_W)
        visual_qkv = self.visual.before(visual_VD, visual_mod, packing.sequence_V)
        q, k, v = (packing.pack(text, visual) for text, visual in zip(text_qkv, visual_qkv, strict=True))
        text_out, visual_out = packing.unpack(attend_rotated(q, k, v, packing, attend))
        return (
            self.text.after(text_WD, text_out, text_mod, packing.sequence_W),
            self.visual.after(visual_VD, visual_out, visual_mod, packing.sequence_V),
        )


class SingleBlock(nn.Module):
    """Attention and MLP side by side on packed rows: one projection in, one out."""

    def __init__(self, width: int, heads: int, mlp_ratio: float):
        super().__init__()
        hidden = int(width * mlp_ratio)
        self.heads = heads
        self.split = (3 * width, hidden)
        self.modulation = Modulation(width, 3)
        self.qkv_mlp = nn.Linear(width, 3 * width + hidden)
        self.qk_norm = QKNorm(width // heads)
        self.out = nn.Linear(width + hidden, width)

    def forward(self, x_TD: Tensor, cond_SD: Tensor, packing: Packing, attend: Attend) -> Tensor:
        shift_SD, scale_SD, gate_SD = self.modulation(cond_SD)
        rows = self.qkv_mlp(norm_modulate(x_TD, shift_SD, scale_SD, packing.sequence_T))
        qkv, mlp = rows.split(self.split, 1)
        q, k, v = qkv.unflatten(1, (3, self.heads, -1)).unbind(1)
        q, k = self.qk_norm(q, k)
        out_THK = attend_rotated(q, k, v, packing, attend)
        y_TD = self.out(torch.cat((out_THK.flatten(1), F.gelu(mlp, approximate="tanh")), 1))
        return add_gated(x_TD, gate_SD, y_TD, packing.sequence_T)


class MMDiT(nn.Module):
    """The velocity of packed latents given text features: equal to diffusers' FluxTransformer2DModel."""

    def __init__(self, config: ModelConfig, channels: int):
        super().__init__()
        self.rope_axes, self.rope_theta = tuple(config.rope_axes), config.rope_theta
        shape = (config.width, config.heads, config.mlp_ratio)
        self.latent_in = LatentIn(channels, config)
        self.text_in = DoorLinear(config.text.features, config.width)
        self.conditioning = Conditioning(config.width, config.text.pooled, config.guidance_embed)
        self.double_blocks = nn.ModuleList(DoubleBlock(*shape) for _ in range(config.double_blocks))
        self.single_blocks = nn.ModuleList(SingleBlock(*shape) for _ in range(config.single_blocks))
        self.final = FinalLayer(config.width, channels)

    def forward(
        self,
        tokens: Tokens,
        text_WE: Tensor,
        pooled_SP: Tensor,
        attend: Attend,
        guidance_S: Tensor | None = None,
    ) -> Tensor:
        """[V, C] float32 velocity of tokens.latent_VC; the captions in `tokens` are not looked at."""
        packing = Packing.of(tokens, self.rope_axes, self.rope_theta)
        cond_SD = self.conditioning(tokens.time_S, pooled_SP, guidance_S)
        text_WD = self.text_in(text_WE)
        visual_VD = self.latent_in.embed(tokens)
        for block in self.double_blocks:
            text_WD, visual_VD = block(text_WD, visual_VD, cond_SD, packing, attend)
        x_TD = packing.pack(text_WD, visual_VD)
        for block in self.single_blocks:
            x_TD = block(x_TD, cond_SD, packing, attend)
        # The last text rows are nobody's input; unpacking them keeps zero rows an ordinary case.
        _, visual_VD = packing.unpack(x_TD)
        return self.final(visual_VD, cond_SD, packing.sequence_V)
